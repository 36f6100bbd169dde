"""The engine that a configuration asks for, as far as the processes that are there allow."""

from data_tools.errors import ConfigError
from offline_rec.config import FitConfig
from offline_rec.training.engine import Engine
from offline_rec.training.engines.place import Place

DEFAULT_STAGE = 2


def engine_name(config: FitConfig, ranks: int) -> str:
    """What `engine` means in that many processes: torch, ddp or deepspeed."""
    if config.engine != "auto":
        return config.engine
    sharded = config.zero_stage is not None or config.offload
    return "deepspeed" if sharded else "ddp" if ranks > 1 else "torch"


def stage_of(config: FitConfig, ranks: int) -> int:
    """The ZeRO stage of a fit in that many processes; 0 where nothing is shared out."""
    if engine_name(config, ranks) != "deepspeed":
        return 0
    return DEFAULT_STAGE if config.zero_stage is None else config.zero_stage


def choose_engine(config: FitConfig) -> Engine:
    """Make the engine of this process; `ConfigError` where `engine` does not fit the number of processes.

    `auto` is DeepSpeed where a ZeRO stage or offload is asked for, plain torch in one process, else ddp.
    """
    place = Place.here()
    name = engine_name(config, place.size)
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

    return ZeroEngine(config.device, stage=stage_of(config, place.size), offload=config.offload)
