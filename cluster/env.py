"""The only reader and writer of environment variables.

Read: BATON_CACHE (folder of models and locks; otherwise XDG_CACHE_HOME/baton, otherwise ~/.cache/baton), HOME,
NO_COLOR. Written before Ray is imported, for every process it starts: the variables of `ray_variables`.
"""

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

RUN_VARIABLE = "BATON_RUN"
"""Set in every process of a run to the path of its run folder: how leftovers of a dead run are recognised."""


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder that outlives runs: models and locks. It may not exist yet."""
    if named := environ.get("BATON_CACHE"):
        return Path(named).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base).absolute() / "baton"


def is_colour_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    return not environ.get("NO_COLOR")


def ray_variables(run_folder: Path, num_threads: int) -> dict[str, str]:
    """What every Ray process of a run is started with.

    The first variable makes Ray listen on loopback; with a token in the environment Ray writes none to the home folder;
    TMPDIR keeps what libraries leave in the temporary folder inside the run folder.
    """
    return {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(num_threads),
        "TMPDIR": str(run_folder / "tmp"),
        RUN_VARIABLE: str(run_folder),
    }


def prepare_ray(run_folder: Path, num_threads: int = 1) -> None:
    """Sets Ray's variables in this process. Ray reads them when it is imported, so it must not be imported yet."""
    assert "ray" not in sys.modules, "set Ray's variables before the first import of ray"
    os.environ.update(ray_variables(run_folder, num_threads))


def with_temp(folder: Path) -> dict[str, str]:
    """The environment of a child process whose temporary files go to `folder`."""
    return {**os.environ, "TMPDIR": str(folder)}
