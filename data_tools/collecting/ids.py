"""Deterministic identities: of a record's content, a log, a prompt, a group and a response.

None of them holds a path or a time, so a log that was moved, compressed again or grown gives the same ids.
"""

import hashlib
from collections.abc import Callable, Iterable

DIGEST_BYTES = 16


def digest(*parts: bytes | str) -> bytes:
    """Hash the parts, each with its length, so that ("ab", "c") and ("a", "bc") differ."""
    return _hash(parts).digest()


def _hash(parts: Iterable[bytes | str]) -> "hashlib.blake2b":
    data = [part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in parts]
    return hashlib.blake2b(b"".join(map(_with_length, data)), digest_size=DIGEST_BYTES)


def _with_length(part: bytes) -> bytes:
    return b"%d:%b" % (len(part), part)


def record_digest(raw: bytes) -> bytes:
    """Hash one record as it stands in the log, without the white space around it (CRLF equals LF).

    SHA-1, because it is the fastest on long lines with and without instructions for it (1.5 GB/s with).
    """
    return hashlib.sha1(raw.strip(), usedforsecurity=False).digest()[:DIGEST_BYTES]


def choice_digest(record: bytes, choice: int) -> bytes:
    """Hash of the `choice`-th response that one record holds; the first keeps the record's own hash."""
    return record if choice == 0 else digest("choice", record, str(choice))


def prompt_hash(canonical: str, tools: str | None) -> str:
    """Hash of a canonical prompt and its tool definitions: equal prompts of different logs meet here."""
    return digest("prompt", canonical, tools or "").hex()


def prompt_ids_hash(token_ids: bytes) -> str:
    """Hash of a prompt known only by its token ids (their int32 bytes)."""
    return digest("prompt-ids", token_ids).hex()


def group_id(format_name: str, scope: str, key: str) -> str:
    """Hash of a log's own group key within its run; bare keys such as 3 collide across logs."""
    return digest("group", format_name, scope, key).hex()


def given_response_id(format_name: str, scope: str, given: str) -> bytes:
    """Hash of an id that the log gives, within its format and run."""
    return digest("given", format_name, scope, given)


def drawn_response_id(fingerprint: bytes) -> Callable[[bytes], bytes]:
    """Hashes the first occurrence of `content` in a log; `occurrence_id` tells later ones apart."""
    begun = _hash(("drawn", fingerprint))

    def drawn(content: bytes) -> bytes:
        hashed = begun.copy()
        hashed.update(_with_length(content))
        return hashed.digest()

    return drawn


OCCURRENCE_SQL = "md5({id} || ':' || {n})"
"""The id of the n-th further occurrence (n >= 1) in DuckDB; `occurrence_id` is the same in Python."""


def occurrence_id(first: str, n: int) -> str:
    """Response id of the n-th occurrence (from 0) of an equal record in one log: each is its own draw."""
    return first if n == 0 else hashlib.md5(f"{first}:{n}".encode(), usedforsecurity=False).hexdigest()
