"""Which of several processes this one is, as torchrun and other launchers tell it. No torch."""

import os
from dataclasses import dataclass

from data_tools.errors import ConfigError, RecError

LOST = 3
"""Exit code of a rank that ends because another one has gone."""


class LostRank(RecError):
    """Another process of the run does not answer any more."""

    exit_code = LOST


@dataclass(frozen=True)
class Place:
    """`rank` of `size` processes, the `local`-th of its machine; `launched` by something that set them up."""

    rank: int = 0
    size: int = 1
    local: int = 0
    launched: bool = False

    @classmethod
    def here(cls) -> "Place":
        """Read it from RANK, WORLD_SIZE and LOCAL_RANK; alone where they are not set."""
        if "RANK" not in os.environ:
            return cls()
        try:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            return cls(rank, size, int(os.environ.get("LOCAL_RANK", rank)), launched=True)
        except (KeyError, ValueError) as error:
            raise ConfigError(
                "RANK is in the environment, but WORLD_SIZE and LOCAL_RANK are not numbers beside it",
                "start with --processes N, --gpus N or torchrun, or unset RANK",
            ) from error
