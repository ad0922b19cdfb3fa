"""`baton config` prints every resolved setting and why; `baton validate` checks a configuration file."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from cluster import env
from cluster.cli.footprint import describe_footprint, read_facts
from cluster.config import ClusterConfig, ModelConfig, find_config, load_cluster
from cluster.model_store import find_model, model_folder
from cluster.plan import make_plan, this_machine
from cluster.resolve import Setting, given_settings
from cluster.yaml_source import read_yaml, validate

CONFIG_EXAMPLES = """examples:
  baton config                      the laptop cluster
  baton config laptop-colocated     another file of configs/clusters
  baton config ./mine.yaml          a file of your own
"""
WIDE = 24
"""A longer value shifts its own line only."""
VALIDATE_EXAMPLES = """examples:
  baton validate ./mine.yaml                       a cluster, with the model it names
  baton validate configs/models/smollm2-135m.yaml  a model
"""


def add_config_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "config",
        help="print every setting and why",
        epilog=CONFIG_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name", nargs="?", default="laptop", help="a file of configs/clusters, or a path (default: laptop)"
    )
    parser.set_defaults(run=lambda options: show_config(options.name))


def add_validate_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "validate",
        help="check a configuration file",
        epilog=VALIDATE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", help="the YAML file of a cluster or a model")
    parser.set_defaults(run=lambda options: check_file(options.path))


def show_config(name: str) -> int:
    config, model = load_cluster(name)
    print("\n".join(render_settings(resolve_settings(config, model))))
    return 0


def resolve_settings(config: ClusterConfig, model: ModelConfig) -> tuple[Setting, ...]:
    """Everything that is decided so far; what needs the model's config.json says so until the model is here."""
    cache, machine = env.cache_dir(), this_machine()
    folder = find_model(model, cache)
    where = Setting("cache", str(cache), "models and locks; BATON_CACHE moves it")
    hardware = Setting("machine", f"{machine.num_cpus} CPUs, {machine.memory_bytes / (1 << 30):.0f} GiB", "found")
    if folder is not None:
        return (*make_plan(config, model, folder, machine).settings, where, hardware)
    later = Setting("worker.*", "open", "decided at the first start, from the model's config.json")
    path = Setting(
        "model.path", str(model_folder(model, cache)), "not here yet: the first `make serve` downloads and converts it"
    )
    return (*given_settings(config, model), path, later, where, hardware)


def render_settings(settings: Sequence[Setting]) -> list[str]:
    """One line per setting: key, value, reason."""
    keys = max(len(setting.key) for setting in settings)
    values = max(len(str(setting.value)) for setting in settings if len(str(setting.value)) <= WIDE)
    return [f"{setting.key:<{keys}}  {setting.value!s:<{values}}  {setting.reason}" for setting in settings]


def check_file(name: str) -> int:
    """0 when the file is valid; `ConfigError` tells each fault with its line and key."""
    source = read_yaml(Path(name))
    if isinstance(source.value, dict) and ("source" in source.value or "id" in source.value):
        model = validate(source, ModelConfig)
        print(f"{name}: ok, model {model.id}")
        return 0
    config = validate(source, ClusterConfig)
    model_file = find_config("models", config.model)
    model = validate(read_yaml(model_file), ModelConfig)
    resolve_settings(config, model)
    print(f"{name}: ok, {config.description or 'a cluster'}; model {model.id} ({model_file})")
    folder = find_model(model, env.cache_dir())
    if folder is None:
        print("What it takes of memory is told once the model is here: `baton fetch` brings it.")
        return 0
    plan = make_plan(config, model, folder, this_machine())
    print("\n".join(["", *describe_footprint(plan, read_facts(plan))]))
    return 0
