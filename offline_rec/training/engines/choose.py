"""The engine that a configuration asks for, as far as the processes that are there allow."""

from data_tools.errors import ConfigError
from offline_rec.config import FitConfig
from offline_rec.training.engine import Engine
from offline_rec.training.engines.place import Place

DEFAULT_STAGE = 2


def choose_engine(config: FitConfig) -> Engine:
    """Make the engine of this process; `ConfigError` where `engine` does not fit the number of processes.

    `auto` is DeepSpeed where a ZeRO stage or offload is asked for, plain torch in one process, else ddp.
    """
    place = Place.here()
    name = config.engine
    if name == "auto":
        sharded = config.zero_stage is not None or config.offload
        name = "deepspeed" if sharded else "ddp" if place.size > 1 else "torch"
    if name == "torch":
        if place.size > 1:
            raise ConfigError(
                f"engine torch is one process, and there are {place.size}",
                "use --set engine=auto, ddp or deepspeed",
            )
        from offline_rec.training.engines.plain import TorchEngine

        return TorchEngine(config.device)
    if name == "ddp":
        from offline_rec.training.engines.ddp import DdpEngine

        return DdpEngine(config.device)
    from offline_rec.training.engines.zero import ZeroEngine

    stage = DEFAULT_STAGE if config.zero_stage is None else config.zero_stage
    return ZeroEngine(config.device, stage=stage, offload=config.offload)
