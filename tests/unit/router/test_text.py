"""The tokenizer folder, the chat template, and that the ingress stays free of torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from router.text.templates import ChatTemplate, TemplateRefused
from router.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import EOS_ID, write_model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model")


def test_special_tokens_are_in_the_prompt_and_never_in_the_text(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.template is not None
    prompt = tokenizer.template.render([{"role": "user", "content": "hello"}])
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids.count(EOS_ID) == 1
    assert tokenizer.eos_ids == (EOS_ID,)
    assert tokenizer.token_bytes(EOS_ID) == b""
    assert tokenizer.piece(EOS_ID) == "<|im_end|>"
    assert tokenizer.token_bytes(10_000) == b""


def test_a_folder_without_template_or_tokenizer(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer(folder).template is None
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer(folder)


def test_a_template_refuses_in_its_own_words_and_cannot_reach_out() -> None:
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render([])
    with pytest.raises(TemplateRefused):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {}).render([])
    with pytest.raises(TemplateRefused):
        ChatTemplate("{{ messages[0]['content'] + 1 }}", {}).render([{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="does not compile"):
        ChatTemplate("{% for %}", {})


def test_a_template_with_a_generation_block_renders_its_body() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endfor %}"
    assert ChatTemplate(source, {"eos_token": "</s>"}).render([{"role": "user", "content": "x"}]) == "x</s>"


def test_a_byte_fallback_vocabulary_joins_bytes_to_characters(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "\u2581a": 1, "b": 2, "<0xC3>": 3, "<0xA9>": 4}
    document = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None,
        "truncation": None, "padding": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>", "byte_fallback": True},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    detokenizer = Tokenizer(tmp_path).make_detokenizer()
    assert [detokenizer.push(token) for token in (1, 2, 3, 4, 1)] == ["a", "b", "", "é", " a"]


def test_importing_the_router_loads_no_torch_ray_or_transformers() -> None:
    code = "import sys, router.app; print({'torch', 'ray', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
