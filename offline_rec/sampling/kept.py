"""A sampler that stays open from one refresh to the next: an engine takes up to a minute to start."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from offline_rec.sampling.choose import SamplerSettings, open_sampler
from offline_rec.sampling.journal import content_digest
from offline_rec.sampling.sampler import Sampler


class KeptSampler:
    """The sampler of a policy whose weights change; `close` it in the end.

    It is given the weights that are asked for, and restarted where it does not take them. One that fails in
    use is closed, and opened anew when it is asked for again; `died` says whether what it asked had ended.
    """

    def __init__(self, settings: SamplerSettings) -> None:
        self.settings = settings
        self.died = False
        self._opened = ExitStack()
        self._sampler: Sampler | None = None
        self._weights = ""

    @contextmanager
    def holding(self, model: str | Path) -> Iterator[Sampler]:
        """The sampler, with the weights in a model directory; RecError where it cannot have them."""
        try:
            yield self._holding(model)
        except BaseException:
            self.died = self._sampler is not None and not self._sampler.alive
            self.close()
            raise

    def close(self) -> None:
        """End what was started for it."""
        self._sampler, self._weights = None, ""
        self._opened.close()

    def _holding(self, model: str | Path) -> Sampler:
        weights = content_digest(model)
        if self._sampler is None:
            self._sampler = self._opened.enter_context(open_sampler(model, self.settings))
        elif not weights or weights != self._weights or not self._sampler.alive:
            self._sampler.update_weights(model)
        self._weights = weights
        return self._sampler
