"""Stands in for vLLM's server: its command line, on a tiny model; a tied head keeps its weights on reload.

`interpreter` gives what `LaunchSettings.python` takes.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def interpreter(folder: Path) -> str:
    """A program that takes the arguments of Python, and serves whatever module it is asked to run."""
    path = folder / "fake-python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m {__name__} "$@"\n')
    path.chmod(0o755)
    return str(path)


def main() -> None:
    import torch

    from offline_rec.models.loading import load_model, load_tokenizer
    from tests.offline_rec.openai_server import FakeServer, serving

    torch.set_num_threads(1)
    options = dict(zip(sys.argv, sys.argv[1:], strict=False))
    directory = options["--model"]

    def load(path: str) -> Any:
        return load_model(path, device=torch.device("cpu"), dtype=torch.float32)

    def control(path: str, body: Any) -> Any:
        if path == "/collective_rpc":
            new = load(body["kwargs"]["weights_path"])
            state = dict(new.state_dict())
            if new.config.tie_word_embeddings:
                server.model.lm_head.weight = torch.nn.Parameter(server.model.lm_head.weight.clone())
                del state["lm_head.weight"]
            server.model.load_state_dict(state, strict=False)
        return (200, {}, json.dumps({"success": True}))

    server = FakeServer(load(directory), load_tokenizer(directory))
    server.control = control
    server.port = int(options["--port"])
    with serving(server):
        time.sleep(600)


if __name__ == "__main__":
    main()
