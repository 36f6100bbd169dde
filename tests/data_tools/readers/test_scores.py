"""Scores that stand elsewhere than their responses, by themselves."""

from data_tools.readers.scores import Level, Member, Score, ScoreBook


def book_of(members, scores):
    book = ScoreBook()
    for member in members:
        book.add_member(member)
    for score in scores:
        book.add(score)
    book.settle()
    return book


def found(book, response):
    return [(score.name, score.value, score.level) for score in book.scores_of(response)]


def test_a_score_finds_its_response_directly_or_through_its_trace():
    members = [
        Member("a", "t1"),
        Member("b", "t2"),
        Member("c", "t2"),
        Member("d", "t3"),
        Member("root", "t3", is_response=False, is_root=True),
        Member("tool", "t3", is_response=False),
    ]
    scores = [Score("own", 1, "a"), *(Score("whole", 2, of) for of in ("t1", "t2", "root", "tool", "gone"))]
    book = book_of(members, scores)
    assert found(book, "a") == [("own", 1, Level.OWN), ("whole", 2, Level.TRACE)]
    assert found(book, "b") == found(book, "c") == [("whole", 2, Level.SHARED)]
    assert found(book, "d") == [("whole", 2, Level.TRACE)]
    assert [book.is_joined(score) for score in scores] == [True, True, True, True, False, False]


def test_the_name_of_the_reward_is_that_of_all_numbers_at_the_nearest_level():
    members = [Member("a", "t1"), Member("b", "t2")]
    assert book_of(members, [Score("x", 1, "a"), Score("tone", "kind", "a")]).reward_name == "x"
    assert book_of(members, [Score("x", 1, "a"), Score("y", 0, "t2")]).reward_name == "x"
    assert book_of(members, [Score("y", 0, "t2")]).reward_name == "y"
    assert book_of(members, [Score("x", 1, "a"), Score("y", True, "b")]).reward_name is None
    assert book_of(members, []).reward_name is None


def test_a_trace_whose_root_is_the_response_counts_a_score_of_it_once():
    book = book_of([Member("a", "a", is_root=True)], [Score("x", 1, "a")])
    assert found(book, "a") == [("x", 1, Level.OWN)]


def test_many_scores_are_joined_in_no_more_than_linear_time():
    count = 20_000  # each pair looked at would take minutes
    members = [Member(f"r{n}", f"t{n}", is_root=True) for n in range(count)]
    scores = [Score("x", n, f"r{n}" if n % 2 else f"t{n}", id=f"s{n}") for n in range(count)]
    book = book_of(members, scores)
    assert [found(book, f"r{n}")[0][1] for n in (0, 1, count - 1)] == [0, 1, count - 1]
