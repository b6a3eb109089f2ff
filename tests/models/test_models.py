"""The lessons' models: parameter counts, behaviour, and every way the course runs them."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from utils.catalog import MODELS, RESNET_PARAMETER_COUNTS, model_shape
from utils.models import Transformer, TransformerConfig, UNet, llama_config, resnet
from utils.models.transformer import rotary, rotate

TINY = TransformerConfig(vocabulary=97, hidden=32, layers=2, heads=4, kv_heads=2, feedforward=48)
LLAMAS = [
    name for name, shape in MODELS.items() if shape.family == "llama" and shape.num_experts is None
]


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def tiny(**changes):
    torch.manual_seed(0)
    return Transformer(replace(TINY, **changes))


def tokens(batch=2, sequence=12):
    return torch.randint(97, (batch, sequence), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("depth", RESNET_PARAMETER_COUNTS)
def test_resnet_has_the_published_parameters(depth):
    with torch.device("meta"):
        model = resnet(depth, stem="imagenet", num_classes=1000)
    assert parameters(model) == RESNET_PARAMETER_COUNTS[depth]


def test_cifar_stem_keeps_the_image_whole():
    # The 3x3 stem has 64 * 3 * (49 - 9) fewer weights; the head 2048 * 990 + 990.
    with torch.device("meta"):
        cifar, imagenet = resnet(50), resnet(50, "imagenet", 1000)
        images = torch.empty(2, 3, 32, 32)
    assert parameters(imagenet) - parameters(cifar) == 64 * 3 * 40 + 2048 * 990 + 990
    sizes = {}
    for name, model in (("cifar", cifar), ("imagenet", imagenet)):
        model.layer1.register_forward_hook(
            lambda module, inputs, output, name=name: sizes.update({name: output.shape[-1]})
        )
        assert model(images).shape == (2, 10 if name == "cifar" else 1000)
    assert sizes == {"cifar": 32, "imagenet": 8}


def test_group_norm_replaces_every_batch_norm():
    model = resnet(18, norm="group")
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert not list(model.buffers())
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"depth": 20}, "depth is 20; write one of 18, 34, 50, 101, 152"),
        ({"stem": "mnist"}, "stem is 'mnist'; write one of 'cifar', 'imagenet'"),
        ({"norm": "layer"}, "norm is 'layer'; write one of 'batch', 'group'"),
        ({"num_classes": 0}, "num_classes is 0"),
        ({"num_classes": float("nan")}, "num_classes is nan; it must be a whole number"),
        ({"num_classes": "10"}, "without quotes: 10"),
    ],
)
def test_resnet_refuses_what_it_cannot_build(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        resnet(**arguments)


@pytest.mark.parametrize("name", LLAMAS)
def test_a_catalog_shape_builds_its_published_model(name):
    with torch.device("meta"):
        model = Transformer(TransformerConfig.from_shape(model_shape(name)))
    assert parameters(model) == MODELS[name].published_count


def test_parts_have_the_catalog_s_counts():
    shape = model_shape("llama-3-8b")
    with torch.device("meta"):
        model = Transformer(TransformerConfig.from_shape(shape))
    counts = shape.parameter_counts()
    assert parameters(model.embed) == counts["embedding"]
    assert sum(parameters(block.attention) for block in model.blocks) == counts["attention"]
    assert sum(parameters(block.feedforward) for block in model.blocks) == counts["mlp"]
    assert parameters(model.head) == counts["head"]


def test_only_llama_shapes_become_configurations():
    with pytest.raises(ValueError, match="mixtral-8x7b has 8 experts in a layer"):
        TransformerConfig.from_shape(model_shape("mixtral-8x7b"))
    with pytest.raises(ValueError, match="gpt2-124m is no Llama-style model"):
        TransformerConfig.from_shape(model_shape("gpt2-124m"))
    assert TransformerConfig.from_shape(model_shape("llama-2-7b"), layers=3).layers == 3


def test_a_name_of_the_catalog_stands_for_the_shape():
    shape = model_shape("llama-2-7b")
    with pytest.raises(ValueError, match=r"write model_shape\('llama-2-7b'\)"):
        TransformerConfig.from_shape("llama-2-7b")
    assert llama_config("llama-2-7b").to_dict() == llama_config(shape).to_dict()
    with pytest.raises(ValueError, match="Nearest: llama-2-7b"):
        llama_config("lama-2-7b")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"heads": 32}, "make hidden a multiple of 64"),
        ({"kv_heads": 3}, "kv_heads must divide heads"),
        ({"kv_heads": 0}, "kv_heads is 0; it must be 1 or more"),
        ({"kv_heads": -1}, "kv_heads is -1; it must be 1 or more"),
        ({"layers": float("nan")}, "layers is nan; it must be a whole number"),
        ({"hidden": "32"}, "without quotes: 32"),
    ],
)
def test_impossible_configurations_are_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(TINY, **change)


def test_no_position_sees_a_later_one():
    model, inputs = tiny(), tokens()
    changed = inputs.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 97
    before, after = model(inputs), model(changed)
    assert before.shape == (2, 12, 97)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 7:], after[:, 7:], rtol=0, atol=1e-4)


def test_scores_depend_on_the_distance_alone():
    torch.manual_seed(0)
    rotation = rotary(torch.arange(10), 8, 100.0)
    query, key = (torch.randn(8).expand(1, 1, 10, 8) for _ in range(2))
    scores = (rotate(query, rotation) @ rotate(key, rotation).transpose(-1, -2))[0, 0]
    torch.testing.assert_close(scores[2, 0].expand(8), scores.diagonal(-2))
    assert (scores[2, 0] - scores[3, 0]).abs() > 1e-3
    torch.testing.assert_close(scores[0, 0], query[0, 0, 0] @ key[0, 0, 0])


def test_a_pair_of_channels_turns_by_its_position_s_angle():
    x = torch.tensor([1.0, 1, 0, 0]).expand(1, 1, 4, 4)
    turned = rotate(x, rotary(torch.arange(4), 4, 100.0))[0, 0]
    fast, slow = torch.arange(4.0), torch.arange(4.0) / 10  # 100 ** (-2 / 4)
    expected = torch.stack([fast.cos(), slow.cos(), fast.sin(), slow.sin()], dim=1)
    torch.testing.assert_close(turned, expected)


def test_the_model_uses_its_rotary_base():
    inputs, plain, other = tokens(), tiny(), tiny(rotary_base=10.0)
    assert torch.equal(plain.embed.weight, other.embed.weight)
    assert not torch.allclose(plain(inputs), other(inputs), rtol=0, atol=1e-4)


def test_attention_is_the_textbook_s():
    attention = tiny(kv_heads=None).blocks[0].attention
    x, rotation = torch.randn(2, 12, 32), rotary(torch.arange(12), 8, 10_000.0)
    query, key, value = (
        layer(x).view(2, 12, 4, 8).transpose(1, 2)
        for layer in (attention.query, attention.key, attention.value)
    )
    scores = rotate(query, rotation) @ rotate(key, rotation).transpose(-1, -2) / 8**0.5
    future = torch.ones(12, 12, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ value
    expected = attention.output(mixed.transpose(1, 2).reshape(2, 12, 32))
    torch.testing.assert_close(attention(x, rotation), expected)


@pytest.mark.parametrize("changes", [{}, {"tied": True, "qkv_bias": True}])
def test_gradient_reaches_all_parameters(changes):
    model = tiny(**changes)
    model(tokens()).square().mean().backward()
    for name, parameter in model.named_parameters():
        # The key's bias adds the same to all scores of a query, which softmax ignores.
        if not name.endswith("key.bias"):
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_tied_head_shares_its_storage_even_after_to_empty():
    model = tiny(tied=True)
    assert parameters(tiny()) - parameters(model) == 97 * 32
    with torch.device("meta"):
        late = Transformer(replace(TINY, tied=True))
    late = late.to_empty(device="cpu")
    for tied in (model, late, late.to(torch.bfloat16)):
        assert tied.head.weight is tied.embed.weight
    assert parameters(late) == parameters(model)


def test_grouped_queries_equal_full_heads_with_repeated_keys():
    grouped, full = tiny(), tiny(kv_heads=None)
    weights = grouped.state_dict()
    for name, weight in weights.items():
        if ".key." in name or ".value." in name:
            weights[name] = weight.view(2, 8, 32).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    torch.testing.assert_close(grouped(tokens()), full(tokens()))


def test_attention_works_with_a_rank_s_share_of_the_heads():
    model = tiny()
    whole, captured = model.blocks[0].attention, []
    whole.register_forward_hook(lambda module, inputs, output: captured.append((inputs, output)))
    model(tokens())
    (inputs, expected), total = captured[0], 0
    for rank in range(2):
        share = tiny().blocks[0].attention
        for name in ("query", "key", "value"):
            getattr(share, name).weight = nn.Parameter(
                getattr(whole, name).weight.chunk(2, dim=0)[rank]
            )
        share.output.weight = nn.Parameter(whole.output.weight.chunk(2, dim=1)[rank])
        total = total + share(*inputs)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = tiny()
    with torch.autocast("cpu", dtype):
        logits = model(tokens())
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.float(), model(tokens()), rtol=0.1, atol=0.02)


def test_meta_then_to_empty_then_init_equals_a_model_built_in_place():
    with torch.device("meta"):
        late = Transformer(TINY)
        assert late(torch.empty(2, 12, dtype=torch.int64)).is_meta
    late.to_empty(device="cpu")
    late.load_state_dict(tiny().state_dict())
    torch.testing.assert_close(late(tokens()), tiny()(tokens()))
    late.init_weights()
    assert late.embed.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not list(late.buffers())


def test_fake_mode_takes_a_whole_step():
    with FakeTensorMode():
        model = Transformer(TINY)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randint(97, (2, 12))).mean().backward()
        optimizer.step()
        assert all(isinstance(parameter.grad, FakeTensor) for parameter in model.parameters())


def test_compiles_as_one_graph():
    model = tiny()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens()), model(tokens()))


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_unet_gives_an_image_for_an_image_and_a_step(norm):
    torch.manual_seed(0)
    model = UNet((16, 24, 32), blocks_per_level=2, norm=norm)
    images = torch.randn(2, 3, 16, 16)
    first, second = model(images, torch.tensor([1, 1])), model(images, torch.tensor([1, 500]))
    assert first.shape == images.shape
    assert not torch.allclose(first[1], second[1])  # the time step counts
    first.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert len(model.blocks) == 9
    assert len({id(block) for block in model.blocks}) == 9


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"norm": "layer"}, "norm is 'layer'; write one of 'group', 'batch'"),
        ({"channels": (16,)}, "two or more, multiples of 8"),
        ({"channels": (16, 20)}, "multiples of 8"),
        ({"blocks_per_level": 0}, "blocks_per_level is 0"),
        ({"blocks_per_level": float("nan")}, "blocks_per_level is nan"),
        ({"channels": (16, "24")}, "without quotes: 24"),
    ],
)
def test_impossible_unets_are_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        UNet(**arguments)


def test_an_image_that_cannot_be_halved_is_refused():
    with pytest.raises(ValueError, match="must be multiples of 4"):
        UNet((16, 16, 16))(torch.randn(1, 3, 10, 10), torch.tensor([0]))
