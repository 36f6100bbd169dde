import sys
from types import ModuleType, SimpleNamespace

import pytest

from data_tools.collecting.redaction import Redactor, luhn, redactor
from data_tools.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("Mail jane.doe+x@mail.example.co.uk.", "Mail [EMAIL]."),
        ("<ÿves@exämple.de>", "<[EMAIL]>"),
        ("card 4111 1111 1111 1111, thanks", "card [CARD], thanks"),
        ("4111111111111111", "[CARD]"),
        ("378282246310005 or 3782-822463-10005", "[CARD] or [CARD]"),
        ("from 203.0.113.7:8080", "from [IP]:8080"),
        ("2001:db8::8a2e:370:7334 and fe80::1:2", "[IP] and [IP]"),
        ("+49 30 1234567", "[PHONE]"),
        ("tel:+14155550123", "tel:[PHONE]"),
        ("(415) 555-0123 / 415-555-0123 / 415.555.0123", "[PHONE] / [PHONE] / [PHONE]"),
        ("1-415-555-0123", "[PHONE]"),
    ],
)
def test_personal_data_is_replaced_by_its_kind(text, clean):
    assert Redactor().text(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        "4111 1111 1111 1112",  # the check digit is wrong
        "1234567812345670",  # right, but no card begins with 1
        "0.4111111111111111",
        "999.1.2.3, 1.2.3, 1.2.3.4.5",
        "127.0.0.1 ::1 0.0.0.0",
        "std::vector a::b 12:30:45 00:1a:2b:3c:4d:5e",
        "12+34567890123=",
        "512 304 2211 + 415 555 0123",
        "3.14159265358979 1764000000000000000",
        "+1 015 555 0123",  # no area code begins with 0
        "@decorator a@b user@localhost",
        "data:image/png;base64,+49301234567/41111111",
        "321+654=",
        "",
    ],
)
def test_what_only_looks_like_it_stays(text):
    found = Redactor()
    assert found.text(text) == text
    assert not found.counts


def test_the_check_digit_is_that_of_the_norm():
    assert luhn("79927398713")
    assert not any(luhn(f"7992739871{digit}") for digit in (0, 1, 2, 4, 5, 6, 7, 8, 9))


def test_redacting_twice_changes_nothing_more():
    once = Redactor().text("a@b.com 4111111111111111 +49 30 1234567 1.2.3.4")
    again = Redactor()
    assert again.text(once) == once
    assert not again.counts


def test_every_text_in_a_value_is_looked_through_and_counted():
    found = Redactor()
    value = {"a@b.com": [1, {"deep": ["x", b"c@d.org"]}], "card": 4111111111111111, "f": 4111111111111111.0}
    assert found.value(value) == {"[EMAIL]": [1, {"deep": ["x", "[EMAIL]"]}], "card": "[CARD]", "f": "[CARD]"}
    assert found.counts == {"email": 2, "card": 2}


def test_values_without_personal_data_are_themselves():
    value = {"t": (1, 2), "n": None, "b": True, "x": float("nan"), "big": 10**30, "inf": float("inf")}
    assert Redactor().value(value) == value


@pytest.mark.parametrize("wrap", [lambda token: token, lambda token: {"token": token, "logprob": -0.1}])
def test_texts_of_tokens_are_looked_through_together(wrap):
    tokens = [wrap(token) for token in ("write", " jane", "@", "mail", ".com")]
    assert Redactor().value({"logprobs": tokens}) == {"logprobs": ["write [EMAIL]"]}


def test_the_patterns_take_linear_time():
    for text in ("a" * 200_000 + "@", "1 " * 100_000, "+1" * 100_000, "a:" * 100_000, "1." * 100_000):
        assert isinstance(Redactor().text(text), str)


def presidio(monkeypatch, engine):
    module = ModuleType("presidio_analyzer")
    module.AnalyzerEngine = engine
    monkeypatch.setitem(sys.modules, "presidio_analyzer", module)


class Engine:
    def get_supported_entities(self, language):
        return ["PERSON", "EMAIL_ADDRESS", "DATE_TIME"]

    def analyze(self, *, text, language, entities, score_threshold):
        assert (language, entities) == ("en", ["PERSON", "EMAIL_ADDRESS"])
        found = [("PERSON", "Jane Doe", 0.85), ("PERSON", "Jane", 0.6), ("EMAIL_ADDRESS", "j@x.org", 1.0)]
        return [
            SimpleNamespace(
                entity_type=kind, start=text.index(part), end=text.index(part) + len(part), score=score
            )
            for kind, part, score in found
            if part in text
        ]


def test_presidio_finds_names_where_it_is_installed_and_patterns_still_count(monkeypatch):
    presidio(monkeypatch, Engine)
    found = redactor()
    assert found.text("Jane Doe (j@x.org) has 4111111111111111") == "[PERSON] ([EMAIL]) has [CARD]"
    assert found.counts == {"person": 1, "email": 1, "card": 1}
    assert "Presidio" in found.means


def test_presidio_without_its_model_is_one_clear_error(monkeypatch):
    def fails():
        raise SystemExit(1)

    presidio(monkeypatch, fails)
    with pytest.raises(ConfigError, match="cannot start") as error:
        redactor()
    assert "spacy download" in error.value.hint


def test_without_presidio_the_patterns_stand_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)
    assert "Presidio" not in redactor().means
