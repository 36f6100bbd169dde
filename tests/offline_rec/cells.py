"""Many fits in one launch of several processes, so that imports and rendezvous are paid once.

`python -m tests.offline_rec.cells FILE`, on every rank: FILE is a JSON list of jobs, each the fields of a
`FitConfig` and whether it resumes.
"""

import json
import sys
from pathlib import Path
from typing import Any

from offline_rec.config import FitConfig
from offline_rec.training.engines import zero
from offline_rec.training.engines.choose import choose_engine
from offline_rec.training.fit import fit


def main(file: str) -> None:
    import torch.distributed as dist

    zero.PERSISTENT_ELEMENTS = 0  # the model is so small that stage 3 would shard nothing
    from offline_rec.training.engines.ddp import DdpEngine

    first: Any = DdpEngine("cpu")  # makes the group that all engines use
    for job in json.loads(Path(file).read_text()):
        config = FitConfig(**job["config"])
        fit(config, resume=job.get("resume", False), engine=choose_engine(config))
    first.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
