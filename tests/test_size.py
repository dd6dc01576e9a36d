"""``kv_size`` on named cases: dtypes, blocks, ranks, stages, drafts, and refusals."""

from __future__ import annotations

import re

import msgspec
import pytest

from kvferry.dtypes import ALIASES, DTYPES, WIRE_FORMATS, DtypeClass, dtype_named
from kvferry.errors import InputError
from kvferry.layout import (
    BlockTable,
    Conversions,
    Extent,
    PoolLayout,
    WireFormat,
    cut_windows,
    wire_form,
    wire_nbytes,
)
from kvferry.link.presets import PRESETS, link_preset
from kvferry.model import (
    CacheTensor,
    LayerGroup,
    LayerKind,
    ModelShape,
    TensorRole,
    load_shape,
    with_draft,
)
from kvferry.size import kv_size, state_record_bytes
from kvferry.state import encode_state
from size_cases import golden_cases
from state_cases import good_state

LLAMA_8B = load_shape("shape:32x8x128")
MLA = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [
        ("fp16", 131072),
        ("bfloat16", 131072),
        ("fp32", 262144),
        ("fp8", 65536),
        ("fp8_e5m2", 65536),
        ("int8_per_token_head", 67584),
        ("int4_per_token_head", 34816),
        ("nvfp4", 36864),
        ("mxfp4", 34816),
        ("q8_0", 69632),
        ("q5_1", 49152),
        ("q5_0", 45056),
        ("q4_1", 40960),
        ("q4_0", 36864),
        ("iq4_nl", 36864),
    ],
)
def test_bytes_per_token_by_dtype(dtype: str, nbytes: int) -> None:
    """Llama-3.1-8B takes the published bytes per token in every KV dtype."""
    assert kv_size(LLAMA_8B, 1, kv_dtype=dtype).logical_bytes == nbytes


@pytest.mark.parametrize("cached", [0, 32])
def test_a_wire_format_is_what_a_transfer_sends(cached: int) -> None:
    """K and V as a byte a value and a scale for each (block, head); as many bytes as windows are cut into."""
    form = {"kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "block_size": 16, "num_blocks": 8}
    pool = PoolLayout.paged(range(4), **form)  # type: ignore[arg-type]
    side = (pool, (BlockTable(0, range(8)),))
    for wire in WIRE_FORMATS:
        crossing = wire_form(pool, pool, Conversions(wire=wire))  # type: ignore[arg-type]
        assert crossing is not None
        windows = cut_windows(crossing, side, side, Extent(128, cached, (0, 128)), slot_nbytes=1 << 20)
        asked = {"kv_dtype": "bf16", "block_size": 16, "cached_tokens": cached, "wire_format": wire}
        size = kv_size(load_shape("shape:4x8x128"), 128, **asked)  # type: ignore[arg-type]
        assert size.wire_bytes - size.state_bytes == wire_nbytes(windows)
        assert size.logical_bytes == 4 * 2 * 8 * 128 * 128 * 2  # the pools hold what they held


def test_latents_and_state_have_no_wire_format() -> None:
    """Only floating-point K and V are scaled: an MLA cache crosses as it is, and so does a quantised one."""
    for shape, dtype in ((ModelShape.from_config(MLA), "bf16"), (LLAMA_8B, "fp8")):
        sizes = [
            kv_size(shape, 64, kv_dtype=dtype, block_size=16, wire_format=wire) for wire in (None, "int8")
        ]
        assert sizes[0].wire_bytes == sizes[1].wire_bytes


def test_wire_formats_have_one_list() -> None:
    """What sizes count is what transfers send."""
    assert tuple(WireFormat) == WIRE_FORMATS


def test_ggml_dtypes_agree_with_the_gguf_package() -> None:
    """The block sizes of ggml dtypes are those that the gguf package has."""
    gguf = pytest.importorskip("gguf", reason="extra [demo] is not installed: no gguf")
    for dtype in DTYPES.values():
        if dtype.dtype_class is DtypeClass.GGML:
            sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype.name.upper()]]
            assert sizes == (dtype.group_values, dtype.group_nbytes)


def test_every_alias_names_a_dtype() -> None:
    """Aliases, with and without ``torch.``, lead to dtypes of the table."""
    for alias, name in ALIASES.items():
        assert dtype_named(f"torch.{alias}") is DTYPES[name]


def test_k_and_v_apart() -> None:
    """K and V may have dtypes of their own; each then has a piece of its own."""
    size = kv_size(LLAMA_8B, 16, k_dtype="q8_0", v_dtype="q4_0", block_size=16)
    assert size.logical_bytes == 16 * 53248
    assert size.descriptors == 2 * 32
    assert kv_size(LLAMA_8B, 16, kv_dtype="q8_0", v_dtype="q4_0").logical_bytes == 16 * 53248


@pytest.mark.parametrize(
    ("model", "dtype", "named"),
    [
        (MLA, "nvfp4", "nvfp4_ds_mla"),
        (MLA, "fp8_per_token_head", "fp8_ds_mla"),
        ("shape:2x8x128", "fp8_ds_mla", "full_attention"),
        ("shape:2x8x128", "fp8_group128", "full_attention"),
        ("shape:2x8x80", "q8_0", "80"),
        ("shape:2x8x33", "int4_per_token_head", "33"),
        ({**MLA, "kv_lora_rank": 256}, "fp8_ds_mla", "mla"),
    ],
)
def test_dtype_without_a_layout_is_refused(model: str | dict[str, object], dtype: str, named: str) -> None:
    """A dtype that a kind of cache cannot hold is an error that says what does or why."""
    shape = load_shape(model) if isinstance(model, str) else ModelShape.from_config(model)
    with pytest.raises(InputError, match="kv_dtype") as error:
        kv_size(shape, 1, kv_dtype=dtype)
    assert named in str(error.value)


def test_one_vector_has_one_dtype() -> None:
    """MLA stores K and V in one vector, so unlike dtypes are refused."""
    with pytest.raises(InputError, match="v_dtype"):
        kv_size(ModelShape.from_config(MLA), 1, k_dtype="bf16", v_dtype="fp8")


def test_mla_is_replicated_and_crosses_once() -> None:
    """Every rank holds all of an MLA cache; the wire and the descriptors count one copy."""
    size = kv_size(ModelShape.from_config(MLA), 1024, kv_dtype="bf16", tp=8, block_size=64)
    assert set(size.rank_bytes) == {1024 * 70272}
    assert size.allocated_bytes == 8 * size.logical_bytes
    assert size.wire_bytes == size.logical_bytes + size.state_bytes
    assert size.descriptors == 61 * 16


def test_heads_that_do_not_divide_say_what_would() -> None:
    """TP 6 does not split 8 heads; the error names the nearest degrees that do."""
    with pytest.raises(InputError, match=r"tp: 6 .* 8 heads of full_attention; nearest .*: 4 and 8$"):
        kv_size(LLAMA_8B, 1, tp=6)
    with pytest.raises(InputError, match=r"tp: 33 .* 32 and 40$"):
        kv_size(LLAMA_8B, 1, tp=33)


def test_state_heads_are_never_replicated() -> None:
    """A recurrent state has one owner per head: more ranks than heads are refused."""
    config = {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    }
    shape = ModelShape.from_config(config)
    assert kv_size(shape, 1, tp=4).allocated_bytes > kv_size(shape, 1).allocated_bytes
    with pytest.raises(InputError, match=r"tp: 8 .*gated_delta_net"):
        kv_size(shape, 1, tp=8)


def test_descriptors_count_blocks_layers_and_ranks() -> None:
    """Pieces: blocks to move x layers x ranks that hold other heads; unpaged: one a layer and rank."""
    shape = load_shape("shape:80x8x128")
    assert kv_size(shape, 4096, cached_tokens=3590, tp=8, block_size=16).descriptors == 80 * 32 * 8
    assert kv_size(shape, 4096, cached_tokens=3584, tp=16, block_size=16).descriptors == 80 * 32 * 8
    assert kv_size(shape, 4096).descriptors == 80
    assert kv_size(shape, 4096, cached_tokens=4096).descriptors == 0


def test_a_window_grows_until_it_is_full() -> None:
    """One token short of the window each token still adds; from the full window on none does."""
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    config = {"model_type": "mistral", "num_hidden_layers": 1, **heads, "sliding_window": 64}
    shape = ModelShape.from_config({**config, "dtype": "bfloat16"})
    growing, full = kv_size(shape, 63), kv_size(shape, 64)
    assert (growing.constant_bytes, growing.bytes_per_token) == (0, 32)
    assert (full.constant_bytes, full.bytes_per_token) == (64 * 32, 0)


@pytest.mark.parametrize(
    ("layers", "pp", "stages"),
    [(61, 4, [15, 15, 16, 15]), (10, 4, [2, 3, 3, 2]), (8, 8, [1] * 8), (7, 2, [4, 3]), (80, 8, [10] * 8)],
)
def test_layers_split_over_stages_as_in_vllm(layers: int, pp: int, stages: list[int]) -> None:
    """Layers that are left over go to the stages before the last, counted from the end."""
    size = kv_size(load_shape(f"shape:{layers}x1x1"), 1, pp=pp)
    assert list(size.rank_bytes) == [4 * count for count in stages]


def test_draft_layers_are_on_the_last_stage() -> None:
    """The draft's layers add to the last stage, and to the whole."""
    shape = with_draft(load_shape("shape:4x1x1"), "eagle", 3)
    size = kv_size(shape, 1, pp=2)
    assert size.rank_bytes == (8, 8 + 12)
    assert [group.is_draft for group in size.groups] == [False, True]


def test_state_record_is_apart_and_counted_once() -> None:
    """``state_bytes`` counts entries, token ids, block ids, and logits that travel; the wire has it once."""
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    shape = ModelShape.from_config({**config, "vocab_size": 1000})
    size = kv_size(shape, 100, tp=2, block_size=16)
    assert size.state_bytes == 4096 + 2 * 96 + 4 * 120 + 4 * (100 + 7)
    assert size.state_bytes == state_record_bytes(100, layers=2, tensors=4, blocks=7)
    assert size.wire_bytes == size.blocked_bytes + size.state_bytes
    with_logits = kv_size(shape, 100, tp=2, block_size=16, last_logits=True)
    assert with_logits.state_bytes == size.state_bytes + 4000
    with pytest.raises(InputError, match="last_logits"):
        kv_size(ModelShape.from_config(config), 1, last_logits=True)


def test_state_record_estimate_is_near_a_real_record() -> None:
    """The estimate is within a quarter of the encoded record of a request that carries no draft."""
    state = msgspec.structs.replace(good_state(), draft=None)
    estimate = state_record_bytes(
        len(state.tokens.ids) // 4,
        layers=len(state.layers),
        tensors=len(state.tensors),
        blocks=sum(len(table.ids) // 4 for table in state.blocks),
    )
    assert abs(estimate / len(encode_state(state)) - 1) < 0.25


def test_known_trap_of_bits_and_bytes() -> None:
    """80 layers, 8 heads of 128, 4,096 tokens, 2 bytes: 1,342,177,280 bytes; with 64 heads 8 times that."""
    assert kv_size(load_shape("shape:80x8x128"), 4096).logical_bytes == 1_342_177_280
    assert kv_size(load_shape("shape:80x64x128"), 4096).logical_bytes == 10_737_418_240


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tokens": 0}, "tokens"),
        ({"tokens": -1}, "tokens"),
        ({"tokens": 10**13}, "tokens"),
        ({"tokens": float("nan")}, "tokens"),
        ({"tokens": 1e99}, "tokens"),
        ({"tokens": True}, "tokens"),
        ({"tokens": "5"}, "tokens"),
        ({"tokens": 5, "cached_tokens": 6}, "cached_tokens"),
        ({"tokens": 5, "cached_tokens": -1}, "cached_tokens"),
        ({"tokens": 5, "tp": 0}, "tp"),
        ({"tokens": 5, "tp": 10**6}, "tp"),
        ({"tokens": 5, "pp": 0}, "pp"),
        ({"tokens": 5, "pp": 33}, "pp"),
        ({"tokens": 5, "block_size": 0}, "block_size"),
        ({"tokens": 5, "encoder_tokens": 5}, "encoder_tokens"),
        ({"tokens": 5, "kv_dtype": "fp9"}, "kv_dtype"),
        ({"tokens": 5, "k_dtype": ""}, "k_dtype"),
        ({"tokens": 5, "v_dtype": "x"}, "v_dtype"),
        ({"tokens": 5, "wire_format": "int4"}, "wire_format"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, object], named: str) -> None:
    """Every bad argument is an InputError that begins with its name."""
    with pytest.raises(InputError, match=f"^{named}:"):
        kv_size(LLAMA_8B, **options)  # type: ignore[arg-type]


def test_too_many_ranks_together_are_refused() -> None:
    """tp x pp is bounded, because ``rank_bytes`` has one entry a rank."""
    with pytest.raises(InputError, match="ranks"):
        kv_size(load_shape("shape:1000x1x1"), 1, tp=1000, pp=1000)


def test_cross_attention_needs_the_encoder_length() -> None:
    """Where the model does not fix the encoder's length it must be given; where it does it may be."""
    t5 = ModelShape.from_config({"model_type": "t5", "num_layers": 2, "num_heads": 2, "d_kv": 8})
    with pytest.raises(InputError, match="encoder_tokens"):
        kv_size(t5, 1)
    whisper = {"model_type": "whisper", "decoder_layers": 2, "decoder_attention_heads": 2, "d_model": 16}
    cross = [g for g in kv_size(ModelShape.from_config(whisper), 1).groups if g.kind is LayerKind.CROSS]
    assert cross[0].logical_bytes == 2 * 1500 * 2 * 16 * 2
    assert kv_size(ModelShape.from_config(whisper), 1, encoder_tokens=0).constant_bytes == 0


def test_presets_are_labelled_and_never_measured() -> None:
    """Every link preset has a public source, is marked unmeasured, and an unknown one lists them all."""
    assert all(preset.source and not preset.is_measured for preset in PRESETS.values())
    assert link_preset("ib-ndr400").bytes_per_second == 400e9 / 8
    with pytest.raises(InputError, match=r"nvlink3.*eth100"):
        link_preset("isdn")


V4 = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "index_head_dim": 128,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4],
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("block", [16, 64, 256, 1024])
def test_a_compressor_is_paged_in_its_own_blocks(block: int) -> None:
    """V4's compressor state and window keep blocks of 4, 8 and 64 rows whatever the block size is."""
    size = kv_size(ModelShape.from_config(V4), 1024, kv_dtype="fp8_ds_mla", block_size=block)
    for group in size.groups:
        if group.kind in {LayerKind.COMPRESSOR, LayerKind.WINDOW}:
            assert group.blocked_bytes == group.logical_bytes
    assert size.wire_bytes - size.state_bytes < 1.02 * size.logical_bytes
    # window: 2 blocks in 43 layers; two states of 2 blocks in 21 layers; 16 blocks in 20 layers
    pieces = {g.limit_tokens: g.descriptors for g in size.groups if g.limit_tokens}
    assert size.groups[0].descriptors == 43 * 2
    assert pieces[8] == 21 * 2 * 2


@pytest.mark.parametrize(
    ("block", "ratio"), [(1, 4), (16, 128), (100, 128), (200, 128), (256, 4), (256, 128), (16, 16)]
)
def test_rows_and_pieces_of_compressed_layers_agree(block: int, ratio: int) -> None:
    """Every piece holds a row that moves and every row that moves lies in a piece, whatever the block is."""
    row = CacheTensor(TensorRole.COMPRESSED, 1, 8)
    group = LayerGroup(LayerKind.COMPRESSED, (0,), (row,), ratio=ratio)
    shape = ModelShape("made", 1, (group,), "bf16")
    rows_per_block = max(1, -(-block // ratio))
    for tokens in (1, 100, 128, 1000, 20_000):
        for cached in (0, 100, 128, 1000, tokens):
            if cached > tokens:
                continue
            size = kv_size(shape, tokens, cached_tokens=cached, block_size=block)
            moved = (size.wire_bytes - size.state_bytes) // 16
            assert moved == size.descriptors * rows_per_block
            assert size.logical_bytes // 16 == tokens // ratio
            held = cached // block * block // ratio // rows_per_block * rows_per_block
            assert moved >= tokens // ratio - held
            assert moved - (tokens // ratio - held) < rows_per_block


def test_cross_attention_is_paged_like_the_rest() -> None:
    """Whisper's 1,500 encoder rows take 94 blocks of 16: 1,504 rows held and moved, in 94 pieces a layer."""
    config = {"model_type": "whisper", "decoder_layers": 2, "decoder_attention_heads": 2, "d_model": 16}
    size = kv_size(ModelShape.from_config({**config, "dtype": "bfloat16"}), 16, block_size=16)
    cross = next(group for group in size.groups if group.kind is LayerKind.CROSS)
    row = 2 * 2 * 16 * 2
    assert (cross.logical_bytes, cross.blocked_bytes) == (1500 * row, 1504 * row)
    assert (cross.wire_bytes, cross.allocated_bytes, cross.descriptors) == (1504 * row, 1504 * row, 2 * 94)


def test_a_chunk_is_neither_constant_nor_slope_once_it_has_turned() -> None:
    """Inside the first chunk it grows like attention; after it the chunk comes and goes and is in neither."""
    config = {
        "model_type": "llama4_text",
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "attention_chunk_size": 100,
        "layer_types": ["chunked_attention"],
        "dtype": "bfloat16",
    }
    shape = ModelShape.from_config(config)
    sizes = {tokens: kv_size(shape, tokens) for tokens in (99, 100, 150, 151)}
    assert (sizes[99].constant_bytes, sizes[99].bytes_per_token, sizes[99].logical_bytes) == (0, 32, 99 * 32)
    assert {(s.constant_bytes, s.bytes_per_token) for t, s in sizes.items() if t >= 100} == {(0, 0)}
    assert [sizes[tokens].logical_bytes for tokens in (100, 150, 151)] == [0, 50 * 32, 51 * 32]


@pytest.mark.parametrize(
    ("config", "tp", "said"),
    [
        (
            {"model_type": "qwen2", "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584},
            8,
            "28 query heads of full_attention; nearest for this model: 4 and 28",
        ),
        ({**MLA, "num_attention_heads": 128}, 7, "128 query heads of mla; nearest for this model: 4 and 8"),
        (
            {**V4, "num_hidden_layers": 2},
            3,
            "64 query heads of sliding_window; nearest for this model: 2 and 4",
        ),
    ],
)
def test_query_heads_must_divide_over_the_ranks(config: dict[str, object], tp: int, said: str) -> None:
    """Engines split query heads evenly; a degree that does not is refused, with the nearest that would."""
    shape = ModelShape.from_config({"num_hidden_layers": 4, **config})
    with pytest.raises(InputError, match=f"^tp: {tp} does not split the {said}$"):
        kv_size(shape, 1, tp=tp)


def test_what_a_refusal_suggests_is_never_refused() -> None:
    """The degrees that are named fit every layer group of a hybrid, not only the one in question."""
    for case in golden_cases():
        shape = ModelShape.from_config(case.config)
        has_cross = any(group.kind is LayerKind.CROSS for group in shape.groups)
        options = {"encoder_tokens": 4 if has_cross else None, "kv_dtype": "bf16"}
        for tp in (3, 5, 6, 24):
            try:
                kv_size(shape, 1, tp=tp, **options)  # type: ignore[arg-type]
            except InputError as error:
                for near in re.findall(r"\d+", str(error).rpartition(":")[2]):
                    kv_size(shape, 1, tp=int(near), **options)  # type: ignore[arg-type]


def test_auto_is_the_model_s_own_dtype() -> None:
    """``auto``, the engines' word for it, is what no dtype at all is."""
    assert kv_size(LLAMA_8B, 7, kv_dtype="auto") == kv_size(LLAMA_8B, 7)


def test_slopes_are_exact_beyond_what_a_float_holds() -> None:
    """A slope of more than 2^53 bytes a token is a whole number, not the nearest float."""
    size = kv_size(load_shape("shape:3x9999999x9999999"), 1)
    assert size.bytes_per_token == size.logical_bytes == 3 * 2 * 9_999_999**2 * 2


def test_many_stages_are_split_in_linear_time() -> None:
    """The borders of 50,000 stages of 100,000 layers are 49,999, two layers apart."""
    size = kv_size(load_shape("shape:100000x1x1"), 1, pp=50_000)
    assert set(size.rank_bytes) == {8}
    assert len(size.rank_bytes) == 50_000


def test_dtypes_of_convolution_and_state_do_not_follow_the_kv_dtype() -> None:
    """A hybrid in fp8 KV keeps its convolution in the model's dtype and its state in float32."""
    config = next(case.config for case in golden_cases() if case.name.startswith("qwen3.5 hybrid, kv in fp8"))
    size = kv_size(ModelShape.from_config(config), 100, kv_dtype="fp8")
    assert [group.dtypes for group in size.groups] == [("fp8_e4m3",), ("bf16", "fp32")]
