"""The run directory: who may write to it, and whether a resume goes on with the run that is there."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_tools.errors import ConfigError, DataError
from offline_rec.config import CONFIG_FILE, FitConfig, changed_fields, fit_config, to_yaml
from offline_rec.data.snapshot import FILE as SNAPSHOT_FILE

UNWRITABLE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}
)


def check_folder(config: FitConfig, *, resume: bool) -> None:
    """Refuse a directory that is taken or, on a resume, one that holds no run or another one."""
    folder = Path(config.out)
    if resume:
        _check_resume(folder, config)
    elif folder.is_file():
        raise ConfigError(f"{folder} is a file, not a run directory", "give another --out")
    elif folder.exists() and any(folder.iterdir()):
        raise _taken(folder)


def _taken(folder: Path) -> ConfigError:
    return ConfigError(f"{folder} exists already", "go on with it by --resume, or give another --out")


def _check_resume(folder: Path, config: FitConfig) -> None:
    if not (folder / CONFIG_FILE).exists():
        raise ConfigError(f"{folder} holds no run to resume", "leave --resume out to begin one")
    changed = changed_fields(fit_config(folder / CONFIG_FILE), config)
    if changed:
        raise ConfigError(
            f"the configuration is not that of the run in {folder}: {'; '.join(changed)}",
            f"rec fit --out {folder} --resume takes the run's own values; another --out begins a new run",
        )


def as_begun(config: FitConfig) -> FitConfig:
    """The configuration with the size of micro-batches that the run directory has settled, if it has."""
    file = Path(config.out) / CONFIG_FILE
    if config.tokens_per_micro_batch is not None or not file.exists():
        return config
    kept = fit_config(file).tokens_per_micro_batch
    return config.model_copy(update={"tokens_per_micro_batch": kept})


def write_config(config: FitConfig) -> None:
    """Write the resolved configuration, the mark of a run directory, atomically."""
    folder = Path(config.out)
    staged = folder / f".{CONFIG_FILE}.tmp"
    staged.write_text(to_yaml(config), encoding="utf-8")
    os.replace(staged, folder / CONFIG_FILE)


@contextmanager
def begun(config: FitConfig) -> Iterator[None]:
    """Make the run directory; if the body raises, take away what this made: a refused run leaves nothing."""
    folder = Path(config.out)
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder):
        if _begun(folder):  # another process was faster
            raise _taken(folder)
        try:
            write_config(config)
            yield
        except BaseException:
            if made:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                _clear(folder)
            raise


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to a run, by a lock that the kernel drops with this process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say that a run cannot be written, and how to go on with it; what is whole in it stays."""
    try:
        yield
    except OSError as error:
        path: object
        if isinstance(error, shutil.Error):
            _, path, told = error.args[0][0]  # the first file of a folder that could not be copied
            reason = str(told).split("] ")[-1].split(": ")[0]
        elif error.errno in UNWRITABLE:
            path, reason = error.filename or folder, error.strerror or str(error)
        else:
            raise
        again = f"go on with: rec fit --out {folder} --resume" if _begun(folder) else "run it again"
        raise DataError(
            f"could not write {path}: {reason}", f"make room or check the permissions, then {again}"
        ) from error


def _begun(folder: Path) -> bool:
    return (folder / SNAPSHOT_FILE).exists()


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"another process is writing to {folder}", "wait for it, or stop it") from error


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
