"""Configuration files: what is shipped loads, and each fault names file, line and key with a hint."""

from pathlib import Path

import pytest

from cluster.cli.main import main
from cluster.config import ClusterConfig, ModelConfig, configs_dir, find_config, load_cluster
from cluster.yaml_source import ConfigError, load_yaml

GOOD = """model: smollm2-135m
disaggregation: always
pools:
  prefill: {replicas: 1}
  decode: {replicas: 1}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted((configs_dir() / "clusters").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_cluster_loads_with_its_model(path):
    cluster, model = load_cluster(path.stem)
    assert cluster.port == 8000
    assert model.id == "smollm2-135m"


@pytest.mark.parametrize("path", sorted((configs_dir() / "models").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_model_loads(path):
    assert load_yaml(path, ModelConfig).id == path.stem


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (("pools:", "pool:"), "mine.yaml:3: pool: unknown key; did you mean 'pools'?"),
        (
            ("decode: {replicas: 1}", "decode: {replica: 1}"),
            "mine.yaml:5: pools.decode.replica: unknown key; did you mean 'replicas'?",
        ),
        (
            ("replicas: 1}", "replicas: 0}"),
            "pools.prefill.replicas: input should be greater than or equal to 1 (found 0)",
        ),
        (("replicas: 1}", 'replicas: "1"}'), "pools.prefill.replicas: input should be a valid integer (found '1')"),
        (
            ("always", "sometimes"),
            "mine.yaml:2: disaggregation: input should be 'always' or 'never' (found 'sometimes')",
        ),
        (("always", "never"), "disaggregation: never needs the pool `colocated`"),
        (("  decode: {replicas: 1}\n", ""), "disaggregation: always needs the pools `prefill` and `decode`"),
        (("model: smollm2-135m\n", ""), "mine.yaml:1: model: is missing; add it"),
        (
            ("pools:", "port: 99999\npools:"),
            "mine.yaml:3: port: input should be less than or equal to 65535 (found 99999)",
        ),
        (("pools:", "host: 0.0.0.0\npools:"), "mine.yaml:3: host: input should be '127.0.0.1' (found '0.0.0.0')"),
        (("pools:", "worker: {num_blocks: some}\npools:"), "worker.num_blocks"),
        (("pools:", "model: other\npools:"), "mine.yaml:3: model: stands twice; keep one of them"),
        (("pools:", "pools: ["), "is not valid YAML"),
    ],
)
def test_a_fault_names_its_place_and_what_to_do(tmp_path, edit, told):
    path = write(tmp_path, GOOD.replace(edit[0], edit[1], 1))
    with pytest.raises(ConfigError) as raised:
        load_yaml(path, ClusterConfig)
    assert told in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", "just words"])
def test_a_file_that_is_no_mapping_is_told_so(tmp_path, text):
    with pytest.raises(ConfigError, match="must be a mapping"):
        load_yaml(write(tmp_path, text), ClusterConfig)


def test_all_faults_are_told_at_once(tmp_path):
    text = GOOD.replace("always", "sometimes").replace("decode: {replicas: 1}", "decode: {replicas: 0}")
    with pytest.raises(ConfigError) as raised:
        load_yaml(write(tmp_path, text), ClusterConfig)
    assert len(str(raised.value).splitlines()) == 2


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="known: laptop, laptop-colocated"):
        find_config("clusters", "labtop")


def test_a_model_has_one_origin(tmp_path):
    with pytest.raises(ConfigError, match="give one of `source`, `path` and `hub`"):
        load_yaml(write(tmp_path, "id: mine\n"), ModelConfig)


def test_validate_says_ok_and_fails_with_the_fault(tmp_path, capsys):
    assert main(["validate", str(write(tmp_path, GOOD))]) == 0
    assert ": ok" in capsys.readouterr().out
    assert main(["validate", str(write(tmp_path, GOOD.replace("pools", "pool")))]) == 1
    assert "did you mean 'pools'?" in capsys.readouterr().err
    assert main(["validate", str(tmp_path / "absent.yaml")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_validate_takes_a_model_file(capsys):
    assert main(["validate", str(configs_dir() / "models" / "smollm2-135m.yaml")]) == 0
    assert "model smollm2-135m" in capsys.readouterr().out


def test_validate_tells_what_fits(smollm2, capsys):
    """The numbers of the shipped model, and one line per precision."""
    assert main(["validate", str(configs_dir() / "clusters" / "laptop.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "134,515,008 numbers: 513 MiB in fp32, 257 MiB in bf16" in shown
    assert "30 layers with full attention: 768 bytes a token and layer in bf16, 22.5 KiB a token" in shown or (
        "1,536 bytes a token and layer in fp32" in shown
    )
    rows = [line.split() for line in shown.splitlines() if "KiB" in line and line.startswith("  ")]
    assert [row[:2] for row in rows] == [
        ["fp32", "fp32"], ["fp32", "bf16"], ["bf16", "bf16"], ["int8", "bf16"], ["q4", "bf16"], ["q4", "fp32"],
    ]  # fmt: skip
    fits = {tuple(row[:2]): int(row[4].replace(",", "")) for row in rows}
    assert fits["q4", "bf16"] > fits["int8", "bf16"] > fits["fp32", "bf16"] > fits["fp32", "fp32"]
