"""The errors that a user is meant to read: what is wrong, where, and what to do about it."""


class RecError(Exception):
    """Something the user can act on; `hint` is the second line, what to do.

    The command line prints both without a traceback and exits with `exit_code`.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class DataError(RecError, ValueError):
    """The data cannot be used as asked: names the file, row or column."""


class ConfigError(RecError, ValueError):
    """An option, a SQL text or a configuration value is wrong: the command was used wrongly."""

    exit_code = 2


class NotEnoughMemory(RecError, MemoryError):
    """The machine has less memory than is needed, or has run out of it."""


class Interrupted(RecError):
    """The user asked to stop, and what was done so far is kept."""


class MissingExtra(RecError, ImportError):
    """An optional dependency is not installed; names the extra that brings it."""

    def __init__(self, package: str, extra: str) -> None:
        hint = f"install it with: pip install 'offline-rec[{extra}]'"
        super().__init__(f"{package} is not installed", hint)
