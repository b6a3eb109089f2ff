"""Loading a base model from a folder: right, packed, missing, cut off, of another kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from utils.catalog import model_shape
from utils.models import BaseModelError, llama_config, load_base
from utils.models.pretrained import enable_checkpointing

TINY = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    use_cache=False,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama on disk, in several files."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    LlamaForCausalLM(TINY).save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def test_a_folder_is_loaded_as_it_was(saved: Path) -> None:
    model = load_base(saved, dtype=torch.float32)
    torch.manual_seed(0)
    for name, wanted in LlamaForCausalLM(TINY).state_dict().items():
        assert torch.equal(model.state_dict()[name], wanted), name


def test_packed_layers_keep_their_layout_in_eval(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a CPU with bfloat16 instructions, where bitsandbytes would repack them."""
    import bitsandbytes

    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: True)
    model = load_base(saved, quantization="nf4-dq")
    packed = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert packed and not any(part.support_avx512bf16_for_cpu for part in packed)


def test_four_bits_but_for_the_head(saved: Path) -> None:
    import bitsandbytes

    model = load_base(saved, quantization="nf4-dq")
    packed = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert len(packed) == 7 * TINY.num_hidden_layers
    assert packed[0].weight.quant_state.nested
    assert model.lm_head.weight.dtype is torch.bfloat16


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match="There is no folder"):
        load_base(tmp_path / "nothing")
    with pytest.raises(BaseModelError, match="There is no folder"):
        load_base("./my/model")


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match="no readable config.json"):
        load_base(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(BaseModelError, match="no readable config.json"):
        load_base(tmp_path)


def test_a_configuration_without_weights(copied: Path) -> None:
    for path in copied.glob("model*"):
        path.unlink()
    with pytest.raises(BaseModelError, match="no weights"):
        load_base(copied)


def test_a_missing_shard(copied: Path) -> None:
    shards(copied)[1].unlink()
    with pytest.raises(BaseModelError, match=r"lacks 1 of \d+ files"):
        load_base(copied)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": []}',
        '{"weight_map": {"a": ["x"]}}',
        "\udcff",
        '{"weight_map": {"a": "/etc/passwd"}}',
        "[" * 100_000,
    ],
)
def test_an_index_that_is_none(copied: Path, text: str) -> None:
    (index,) = copied.glob("*.index.json")
    index.write_text(text, errors="surrogateescape")
    with pytest.raises(BaseModelError, match=r"index\.json is no index of weights"):
        load_base(copied)


def test_a_shard_that_was_cut_off(copied: Path) -> None:
    shard = shards(copied)[0]
    shard.write_bytes(shard.read_bytes()[:-500])
    with pytest.raises(BaseModelError, match="damaged or cut off"):
        load_base(copied)


def test_another_architecture(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(BaseModelError, match="'gpt2'"):
        load_base(tmp_path)


def test_weights_of_another_size(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    config["num_hidden_layers"] = 3
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(BaseModelError, match=r"lacks weights of this architecture.*layers\.2"):
        load_base(copied)


def test_an_unknown_quantization(saved: Path) -> None:
    with pytest.raises(ValueError, match="int3"):
        load_base(saved, quantization="int3")


def test_the_shape_of_llama_2() -> None:
    shape = model_shape("llama-2-7b")
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(shape))
    assert sum(p.numel() for p in model.parameters()) == shape.parameter_count
    assert llama_config(shape, num_hidden_layers=3).num_hidden_layers == 3
    with pytest.raises(ValueError, match="is no Llama"):
        llama_config(model_shape("gpt3-175b"))


def test_checkpointing_computes_blocks_again_with_the_same_gradients() -> None:
    torch.manual_seed(0)
    model, calls = LlamaForCausalLM(TINY).train(), []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    tokens = torch.arange(16)[None]

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    enable_checkpointing(model)
    assert all(map(torch.equal, plain, gradients()))
    assert len(calls) == 3, "once plain, twice where it is computed again"
