"""Where the lines of our own loggers go in a process that Serve started: one file per process, kept after the run.

No prompt text is ever logged, so the files may stay; a start on the same port replaces those of the run before it.
"""

import logging
import shutil
from logging.handlers import RotatingFileHandler
from pathlib import Path

PACKAGES = ("router", "workers", "kv_transfer", "cluster")
MAX_FILE_BYTES = 8 << 20
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def clear_logs(cache: Path, port: int) -> Path:
    """The empty log folder of the cluster on `port`."""
    folder = cache / "logs" / str(port)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def open_log(folder: str, name: str) -> None:
    """From now on INFO lines of our packages go to `folder`/`name`.log; without a folder nothing changes.

    A full or read-only disk costs the lines, not the process.
    """
    if not folder:
        return
    try:
        handler = RotatingFileHandler(Path(folder) / f"{name}.log", maxBytes=MAX_FILE_BYTES, backupCount=1)
    except OSError:
        return
    handler.setFormatter(logging.Formatter(FORMAT))
    logging.raiseExceptions = False
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
