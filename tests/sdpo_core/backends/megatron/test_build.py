"""Building a share of a model: what is refused, what is marked, and what a row's states depend on."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("megatron.core", reason="needs the extra 'megatron'")

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from transformers import PretrainedConfig

from sdpo_core.backends.megatron.build import RowGPT, build_model, transformer_config
from sdpo_core.backends.megatron.layers import layer_spec
from sdpo_core.backends.megatron.names import TRANSFORMER_ENGINE_NAMES, entries, to_shard
from sdpo_core.backends.megatron.shape import model_shape
from sdpo_core.errors import DataError, SpecError
from sdpo_core.layout import LayoutSpec
from tests.sdpo_core.backends.megatron.tiny import llama_config, qwen3_config, tiny_model, tiny_shape

pytestmark = pytest.mark.megatron

CPU = torch.device("cpu")
ALONE = LayoutSpec()


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No group before a test, and none after it."""
    yield
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def loaded(*, dtype: torch.dtype = torch.float32, layout: LayoutSpec = ALONE, value_head: bool = False) -> RowGPT:
    whole = tiny_model(qwen3_config())
    model = build_model(model_shape(whole.config), layout, dtype=dtype, device=CPU, value_head=value_head)
    model.load_shard(to_shard(dict(whole.named_parameters()), model.shape, tensor=1, rank=0))
    return model


def some_ids(*size: int, seed: int = 1) -> Tensor:
    return torch.randint(1, 250, size, generator=torch.Generator().manual_seed(seed))


def test_what_does_not_divide_or_cannot_be_there_is_refused() -> None:
    with pytest.raises(SpecError, match="tensor 2 for a feed-forward layer of 129"):
        build_model(tiny_shape(intermediate_size=129), LayoutSpec(tensor=2), dtype=torch.float32, device=CPU)
    with pytest.raises(SpecError, match=r"got dtype torch.float16, expected one of torch.float32, torch.bfloat16"):
        build_model(tiny_shape(), ALONE, dtype=torch.float16, device=CPU)
    with pytest.raises(SpecError, match="got device cuda, expected 'cpu'"):
        build_model(tiny_shape(), ALONE, dtype=torch.float32, device=torch.device("cuda"))


@pytest.mark.parametrize("config", [qwen3_config(), qwen3_config(tie_word_embeddings=False), llama_config()])
def test_parameters_are_those_of_the_name_table(config: PretrainedConfig) -> None:
    shape = model_shape(config)
    model = build_model(shape, ALONE, dtype=torch.float32, device=CPU, value_head=True)
    assert set(model.shard_parameters()) == {entry.name for entry in entries(shape)}
    assert {"value_head.weight", "value_head.bias"} == set(dict(model.named_parameters())) - set(
        model.shard_parameters()
    )
    assert not any(parameter.any() for parameter in model.value_head.parameters())  # type: ignore[union-attr]


def test_weights_that_tensor_cuts_are_marked_and_others_are_not() -> None:
    """The gradient norm counts a weight without the mark on one process alone."""
    model = build_model(tiny_shape(tie_word_embeddings=False), ALONE, dtype=torch.float32, device=CPU, value_head=True)
    marked = {name for name, each in model.named_parameters() if getattr(each, "tensor_model_parallel", False)}
    whole = {name for name, each in model.named_parameters() if each.dim() == 1 or name.startswith("value_head.")}
    assert marked == set(dict(model.named_parameters())) - whole


def test_shard_of_another_layout_is_refused() -> None:
    model = build_model(tiny_shape(), ALONE, dtype=torch.float32, device=CPU)
    weights = dict(tiny_model(qwen3_config()).named_parameters())
    with pytest.raises(DataError, match=r"load_shard: got other shapes of \['embedding.word_embeddings.weight'"):
        model.load_shard(to_shard(weights, model.shape, tensor=2, rank=0))
    shard = to_shard(weights, model.shape, tensor=1, rank=0)
    del shard["decoder.final_layernorm.weight"]
    with pytest.raises(DataError, match=r"without \['decoder.final_layernorm.weight'\]"):
        model.load_shard(shard)


def test_states_depend_on_nothing_to_the_right() -> None:
    model = loaded()
    ids = some_ids(2, 12)
    one, other = (model(torch.cat([ids, some_ids(2, 4, seed=seed)], dim=1)) for seed in (2, 3))
    assert torch.equal(one[:12], other[:12])
    assert not torch.equal(one[12:], other[12:])


def test_rows_are_not_to_be_padded_on_the_left() -> None:
    """Rotary positions are relative, but padding before a token is attended to."""
    model = loaded()
    ids = some_ids(1, 12)
    padded = torch.cat([some_ids(1, 4, seed=2), ids], dim=1)
    assert (model(padded)[4:] - model(ids)).abs().max() > 1e-2


def test_packed_sequences_do_not_see_each_other() -> None:
    model = loaded(layout=LayoutSpec(packed=True))
    first, second = some_ids(1, 7), some_ids(1, 5, seed=2)
    together = model(torch.cat([first, second], dim=1), (7, 5))
    apart = torch.cat([model(first), model(second)])
    assert together.shape == (12, 1, 64)
    # States reach 4, where float32 has steps of 5e-7.
    assert (together - apart).abs().max() < 5e-6


def test_head_weight_makes_the_logits_of_the_whole_model() -> None:
    for config in (qwen3_config(), qwen3_config(tie_word_embeddings=False)):
        whole = tiny_model(config)
        model = build_model(model_shape(config), ALONE, dtype=torch.float32, device=CPU)
        model.load_shard(to_shard(dict(whole.named_parameters()), model.shape, tensor=1, rank=0))
        ids = some_ids(2, 12)
        logits = (model(ids) @ model.head_weight().T).transpose(0, 1)
        assert (logits - whole(ids).logits).abs().max() < 1e-6


def test_bfloat16_is_that_of_hugging_face() -> None:
    """Both round each layer's result to 8 bits, in another order: 2 ** -8 of states of up to 4, some layers deep."""
    model = loaded(dtype=torch.bfloat16)
    whole = tiny_model(qwen3_config())
    torch.nn.Module.to(whole, torch.bfloat16)
    ids = some_ids(2, 12)
    states = whole.model(input_ids=ids).last_hidden_state.transpose(0, 1)
    found = model(ids)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert found.dtype == torch.bfloat16
    assert (found - states).abs().max() < 0.06


def test_recomputation_runs_the_layers_twice() -> None:
    calls = {}
    for is_recomputed in (False, True):
        model = loaded(layout=LayoutSpec(recompute=is_recomputed))
        counted: list[int] = []
        model.decoder.layers[1].mlp.register_forward_hook(lambda *_, counted=counted: counted.append(1))
        model(some_ids(1, 8)).sum().backward()
        calls[is_recomputed] = len(counted)
    assert calls == {False: 1, True: 2}


def test_states_are_the_same_without_gradients() -> None:
    for layout in (ALONE, LayoutSpec(recompute=True)):
        model = loaded(layout=layout)
        ids = some_ids(2, 8)
        with torch.inference_mode():
            states = model(ids)
        assert not states.requires_grad
        assert torch.equal(states, model(ids))


def test_transformer_engine_is_asked_for_in_words() -> None:
    config = transformer_config(tiny_shape(), ALONE, dtype=torch.float32)
    with pytest.raises(SpecError, match=r"kernels 'transformer_engine', expected TransformerEngine to be installed"):
        layer_spec(config, kernels="transformer_engine")


def test_names_of_transformer_engine_are_those_that_megatron_core_maps_to() -> None:
    """Its local layer declares, for checkpoints, which of its names are which of the fused layers'."""
    declared = get_gpt_layer_local_spec(qk_layernorm=True).submodules.sharded_state_dict_keys_map
    renamed = {
        name.replace(old, new, 1)
        for name in TRANSFORMER_ENGINE_NAMES
        for old, new in declared.items()
        if name.startswith(old)
    }
    assert renamed == set(TRANSFORMER_ENGINE_NAMES.values())
    assert len(declared) == len(TRANSFORMER_ENGINE_NAMES) == 2
