"""Hatch's hook: an install or a wheel carries the CPU kernels and the fence of shared memory built for this machine, or
goes on without them.

pip shows nothing of it; `workers/native/build.json` says how it went, and `baton config` tells.
"""

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernels(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root) / "workers" / "native"
        spec = importlib.util.spec_from_file_location("baton_native_build", folder / "build.py")
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = build  # dataclasses look their module up
        spec.loader.exec_module(build)
        for part in (folder, build.FENCE_FOLDER):
            outcome = build.build(part)
            place = part.relative_to(self.root).as_posix()
            build_data["artifacts"].append(f"/{place}/{build.REPORT.name}")
            if outcome.is_built:
                build_data["artifacts"].append(f"/{place}/{build.LIBRARY.name}")
                build_data["pure_python"] = False
                platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                build_data["tag"] = f"py3-none-{platform}"  # ctypes: any Python, this machine
