"""What quantization_config says, and what of it is refused by name."""

import copy

import pytest

from tests.support.quantized_folders import LAYOUTS
from workers.errors import ModelRefused
from workers.model.scheme import AWQ, FP8, GPTQ, read_scheme

GPTQ_CONFIG = LAYOUTS["gptq v1, groups of 32"].config
AWQ_CONFIG = LAYOUTS["awq, groups of 64"].config
FP8_CONFIG = LAYOUTS["fp8 in blocks of 128"].config


def test_a_config_without_one_is_plain() -> None:
    assert read_scheme({"architectures": ["LlamaForCausalLM"]}) is None


def test_what_older_writers_leave_out() -> None:
    old = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
    assert read_scheme({"quantization_config": old}) == GPTQ(4, 128, is_v1=True, has_act_order=True)
    older = {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}
    assert read_scheme({"quantization_config": older}) == AWQ(128)
    static = {"quant_method": "fp8", "activation_scheme": "static"}
    assert read_scheme({"quantization_config": static}) == FP8(("weight_scale", "weight_scale_inv"), (None, None))
    assert read_scheme({"quantization_config": FP8_CONFIG}) == FP8(("weight_scale_inv",), (128, 128))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "mxfp4"}, "'mxfp4' is not one of awq, compressed-tensors, fp8, gptq"),
        ({"bits": 4}, "quant_method None"),
        (GPTQ_CONFIG | {"bits": 3}, "gptq with bits 3 is not read; bits must be 4 or 8"),
        (GPTQ_CONFIG | {"bits": 2}, "bits 2"),
        (GPTQ_CONFIG | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ_CONFIG | {"is_marlin_format": True}, "is_marlin_format"),
        (GPTQ_CONFIG | {"dynamic": {"-:.*down.*": {}}}, "dynamic"),
        (GPTQ_CONFIG | {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        (GPTQ_CONFIG | {"group_size": 0}, "group_size 0"),
        (AWQ_CONFIG | {"version": "gemv"}, "version 'gemv' is not read; version must be gemm"),
        (AWQ_CONFIG | {"zero_point": False}, "zero_point"),
        (AWQ_CONFIG | {"bits": 8}, "bits 8"),
        (FP8_CONFIG | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (FP8_CONFIG | {"weight_block_size": [128]}, "weight_block_size"),
    ],
)
def test_what_is_not_read_is_named(config, reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        read_scheme({"quantization_config": config})


@pytest.mark.parametrize(
    ("layout", "change", "reason"),
    [
        ("int4 packed, zero points", {"format": "marlin-24"}, "format 'marlin-24'"),
        ("int4 packed, zero points", {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        ("int4 packed, zero points", {"quantization_status": "frozen"}, "quantization_status 'frozen'"),
        ("int4 packed, zero points", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ("int4 packed, zero points", {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ("int4 packed, zero points", {"config_groups": {}}, "config_groups"),
        ("int4 packed, zero points", {"weights": None}, "weights None"),
        ("int4 packed, zero points", {"weights.num_bits": 3}, "num_bits 3"),
        ("int4 packed, zero points", {"weights.strategy": "tensor_group"}, "strategy 'tensor_group'"),
        ("int4 packed, zero points", {"weights.dynamic": True}, "dynamic"),
        ("int4 packed, zero points", {"weights.type": "float"}, "type 'float'"),
        ("int8 per channel", {"weights.num_bits": 4}, "num_bits 4"),
        ("int8 per channel", {"weights.strategy": "block"}, "strategy 'block'"),
        ("fp8 per channel", {"weights.strategy": "group"}, "strategy 'group'"),
        ("fp8 in blocks of compressed-tensors", {"weights.block_structure": "128"}, "block_structure"),
    ],
)
def test_what_is_not_read_of_compressed_tensors_is_named(layout: str, change, reason: str) -> None:
    config = copy.deepcopy(LAYOUTS[layout].config)
    for key, value in change.items():
        group = config["config_groups"]["group_0"] if key.startswith("weights") else config
        target = group["weights"] if "." in key else group
        target[key.rpartition(".")[2]] = value
    with pytest.raises(ModelRefused, match=reason):
        read_scheme({"quantization_config": config})


def test_groups_of_different_schemes_are_refused() -> None:
    config = copy.deepcopy(LAYOUTS["int8 per channel"].config)
    other = copy.deepcopy(config["config_groups"]["group_0"])
    config["config_groups"]["group_1"] = other
    assert read_scheme({"quantization_config": config}) is not None
    other["weights"]["strategy"] = "tensor"
    with pytest.raises(ModelRefused, match="the same for every module"):
        read_scheme({"quantization_config": config})
