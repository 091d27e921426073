"""Which configuration applies to which module, also after the keys of a file are sorted."""

import json
import logging
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.match import (
    assign,
    config_for,
    first_match,
    literal,
    matches,
    report_unmatched,
    with_layers,
    without_order,
)


def spec(group_size):
    return QuantizationSpec("int4", qscheme="per_group", ch_axis=-1, group_size=group_size)


def layer(group_size):
    """A configuration told from others by its group size."""
    return QuantizationConfig(weight=spec(group_size))


GLOBAL, TYPE, NAMED, LATER = layer(1), layer(2), layer(3), layer(4)
OUTPUT = QuantizationSpec("fp8_e4m3", qscheme="per_tensor")
CACHE = QuantizationConfig(weight=spec(5), output_tensors=OUTPUT)

NAMES = [
    "",
    "model.embed_tokens",
    *(
        f"model.layers.{i}.{block}"
        for i in range(2)
        for block in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
    ),
    "lm_head",
]
LINEARS = dict.fromkeys(NAMES[2:], nn.Linear)
Q0, K0 = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
DOWN0 = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", False),
        ("head", "lm_head", False),
        ("*head", "lm_head", True),
        ("model.*", "model.layers.0.mlp", True),
        ("*.0.*", "model.layers.0.mlp", True),
        ("*.0.*", "model.layers.10.mlp", False),
        ("*layers.?.mlp", "model.layers.0.mlp", True),
        ("*layers.?.mlp", "model.layers.10.mlp", False),
        ("*layers.[01].mlp", "model.layers.1.mlp", True),
        ("*layers.[!01].mlp", "model.layers.1.mlp", False),
        ("*Q_proj", "model.q_proj", False),
    ],
)
def test_patterns(pattern, name, expected):
    assert matches(name, ["nothing", pattern]) is expected
    assert first_match(name, {"nothing": LATER, pattern: NAMED}) is (NAMED if expected else None)


def test_first_pattern_wins():
    assert first_match(Q0, {"*q_proj": NAMED, "*.0.*": LATER}) is NAMED
    assert first_match(Q0, {"*.0.*": LATER, "*q_proj": NAMED}) is LATER


PRECEDENCE = Config(
    GLOBAL,
    layer_type_quant_config={nn.Linear: TYPE},
    layer_quant_config={"*q_proj": NAMED, "*.0.*": LATER},
    exclude=["lm_head", "*.1.mlp*"],
)


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        (Q0, nn.Linear, NAMED),
        (DOWN0, nn.Linear, LATER),
        (DOWN0, nn.Conv2d, LATER),
        ("model.layers.1.self_attn.k_proj", nn.Linear, TYPE),
        ("model.layers.1.self_attn.k_proj", nn.Conv2d, GLOBAL),
        ("model.layers.1.mlp.down_proj", nn.Linear, None),
        ("lm_head", nn.Linear, None),
    ],
    ids=[
        "first name",
        "later name",
        "name before type",
        "type",
        "global",
        "excluded",
        "excluded by name",
    ],
)
def test_precedence(name, kind, expected):
    assert config_for(name, kind, PRECEDENCE) == expected


def test_exclusion_precedes_a_name():
    config = Config(GLOBAL, layer_quant_config={"lm_head": NAMED}, exclude=["lm_head"])
    assert config_for("lm_head", nn.Linear, config) is None


def test_types_are_exact():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x).relu()

    config = Config(GLOBAL, layer_type_quant_config={nn.Linear: TYPE})
    assert config_for("a", nn.Linear, config) == TYPE
    assert config_for("a", Own, config) == GLOBAL


def test_a_subclass_of_linear_with_its_product_is_one():
    class Own(nn.Linear):
        def forward(self, x):
            return x @ self.weight.T if self.bias is None else x @ self.weight.T + self.bias

    config = Config(GLOBAL, layer_type_quant_config={nn.Linear: TYPE})
    assert config_for("a", Own, config) == TYPE
    ordered = Config(GLOBAL, layer_quant_config={"b*": TYPE, "*": NAMED})
    assert without_order({"b.a": Own}, ordered).layer_quant_config == {"b.a": TYPE}


def test_an_empty_configuration_leaves_its_layers_alone():
    empty = QuantizationConfig()
    by_name = Config(GLOBAL, layer_quant_config={"*q_proj": empty})
    by_type = Config(GLOBAL, layer_type_quant_config={nn.Conv2d: empty})
    assert config_for(Q0, nn.Linear, by_name) is None
    assert config_for(Q0, nn.Conv2d, by_type) is None
    assert config_for(Q0, nn.Linear, Config()) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(GLOBAL), replace(GLOBAL, output_tensors=OUTPUT)),
        (Config(GLOBAL, exclude=["*k_proj"]), QuantizationConfig(output_tensors=OUTPUT)),
        (
            Config(GLOBAL, layer_quant_config={"*k_proj": NAMED}),
            replace(NAMED, output_tensors=OUTPUT),
        ),
        (
            Config(QuantizationConfig(output_tensors=QuantizationSpec("float16"))),
            QuantizationConfig(output_tensors=QuantizationSpec("float16")),
        ),
        (Config(), QuantizationConfig(output_tensors=OUTPUT)),
    ],
    ids=["beside weights", "excluded", "by name", "own outputs stay", "cache alone"],
)
def test_cache_adds_outputs_only(config, expected):
    config = replace(config, kv_cache_quant_config={"*k_proj": CACHE})
    assert config_for(K0, nn.Linear, config) == expected
    assert config_for(Q0, nn.Linear, config) == config_for(
        Q0, nn.Linear, replace(config, kv_cache_quant_config={})
    )


def test_assign_keeps_the_order_and_leaves_out_the_rest():
    config = Config(layer_quant_config={"*q_proj": NAMED, DOWN0: LATER})
    assert list(assign(LINEARS, config).items()) == [
        (Q0, NAMED),
        (DOWN0, LATER),
        ("model.layers.1.self_attn.q_proj", NAMED),
    ]


@pytest.mark.parametrize(
    ("field", "value", "near"),
    [
        ("exclude", ["lm_heads"], "Nearest: lm_head"),
        ("layer_quant_config", {"*down_prj": NAMED}, "Nearest: down_proj"),
        ("kv_cache_quant_config", {"*kproj": CACHE}, "Nearest: k_proj"),
        ("kv_cache_group", ["*k_prj"], "Nearest: k_proj"),
        ("exclude", ["vision"], "Modules: model.embed_tokens, model.layers.0.self_attn.q_proj, "),
    ],
    ids=["exclude", "layer", "cache", "group", "nothing near"],
)
def test_idle_patterns_are_reported_with_candidates(field, value, near, caplog):
    with caplog.at_level(logging.WARNING):
        idle = report_unmatched(NAMES, Config(GLOBAL, **{field: value}))
    assert idle == list(value)
    (message,) = caplog.messages
    assert message.startswith(f"{field}: pattern {next(iter(value))!r} matches no module")
    assert near in message


def test_patterns_that_match_are_not_reported(caplog):
    config = Config(
        GLOBAL,
        exclude=["lm_head", "model.embed_tokens"],
        layer_quant_config={"*.1.*": NAMED},
        kv_cache_quant_config={"*k_proj": CACHE},
        kv_cache_group=["*k_proj"],
    )
    with caplog.at_level(logging.WARNING):
        assert report_unmatched(NAMES, config) == []
    assert caplog.messages == []


def reread(config):
    """The configuration as a reader of a file with sorted keys sees it."""
    return Config.from_dict(json.loads(json.dumps(config.to_dict(), sort_keys=True)))


def test_sorting_alone_changes_the_meaning_of_overlapping_patterns():
    """The situation that ``without_order`` is for."""
    config = Config(GLOBAL, layer_quant_config={"*down_proj": NAMED, "*.layers.0.*": LATER})
    assert assign(LINEARS, reread(config)) != assign(LINEARS, config)
    assert assign(LINEARS, reread(without_order(LINEARS, config))) == assign(LINEARS, config)


def test_patterns_are_kept_where_sorting_is_harmless():
    patterns = {"*q_proj": NAMED, "*down_proj": LATER}
    config = Config(GLOBAL, layer_quant_config=patterns)
    assert list(without_order(LINEARS, config).layer_quant_config) == list(patterns)


def test_exclusions_are_written_out():
    config = without_order(LINEARS, Config(GLOBAL, exclude=["*.mlp.*", "absent*", "lm_head"]))
    assert config.exclude == [DOWN0, "model.layers.1.mlp.down_proj", "absent*", "lm_head"]


@given(st.text("ab[]!*?.-", max_size=8), st.text("ab[]!*?.-", max_size=8))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_a_literal_name_matches_itself_alone(name, other):
    assert matches(name, [literal(name)])
    assert matches(other, [literal(name)]) is (other == name)


def test_names_with_the_characters_of_patterns():
    """Written out, each of them is found again, and nothing besides."""
    kinds = dict.fromkeys(["a[0]", "a0", "b*", "bc", "c?"], nn.Linear)
    layers = {"*]": NAMED, "*[*]": LATER, "*": layer(6), "*0": layer(7)}
    config = Config(layer_quant_config=layers, exclude=["c[?]"])
    written = without_order(kinds, config)
    assert list(written.layer_quant_config) == ["a[[]0]", "a0", "b[*]", "bc", "c[?]"]
    assert written.exclude == ["c[?]"]
    assert assign(kinds, reread(written)) == assign(kinds, config)


PARTS = st.sampled_from(["a", "b", "ab", "[ab]", "a*", "0", "1", "q_proj", "k_proj"])
MODULE_NAMES = st.lists(
    st.lists(PARTS, min_size=1, max_size=4).map(".".join), min_size=1, max_size=8, unique=True
)
TOKENS = st.sampled_from(["*", "*.", ".*", "?", ".", "[ab]", "a", "b", "0", "q_proj", "_proj"])
PATTERNS = st.lists(
    st.lists(TOKENS, min_size=1, max_size=4).map("".join), min_size=1, max_size=6, unique=True
)


def as_expression(pattern):
    """The regular expression of a pattern: an oracle apart from ``fnmatch``."""
    escaped = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.compile(escaped.replace(r"\[ab\]", "[ab]"), re.DOTALL)


@given(MODULE_NAMES, PATTERNS, PATTERNS, PATTERNS, st.data())
@settings(max_examples=300, deadline=None)
def test_without_order_keeps_the_meaning(names, by_name, cache, exclude, data):
    kinds = {n: data.draw(st.sampled_from([nn.Linear, nn.Conv2d])) for n in names}
    config = Config(
        GLOBAL,
        layer_type_quant_config={nn.Conv2d: TYPE},
        layer_quant_config={p: layer(10 + i) for i, p in enumerate(by_name)},
        kv_cache_quant_config={
            p: QuantizationConfig(output_tensors=replace(OUTPUT, max_input_numel=i))
            for i, p in enumerate(cache)
        },
        exclude=data.draw(st.sampled_from([[], exclude])),
    )
    before = assign(kinds, config)
    assert assign(kinds, reread(without_order(kinds, config))) == before


@given(MODULE_NAMES, PATTERNS)
@settings(max_examples=200, deadline=None)
def test_first_match_against_regular_expressions(names, patterns):
    layers = {p: layer(10 + i) for i, p in enumerate(patterns)}
    for name in names:
        hits = [layers[p] for p in patterns if as_expression(p).fullmatch(name)]
        assert first_match(name, layers) is (hits[0] if hits else None)


class TestWithLayers:
    def test_layers_of_all_blocks_have_one_pattern(self):
        names = [name for name in LINEARS if name.endswith("q_proj")]
        config = with_layers(
            LINEARS, Config(GLOBAL, exclude=["*q_proj"]), dict.fromkeys(names, NAMED)
        )
        assert list(config.layer_quant_config) == ["model.layers.*.self_attn.q_proj"]
        assert config.exclude == []
        assert assign(LINEARS, config) == {n: NAMED if n in names else GLOBAL for n in LINEARS}

    def test_others_keep_what_they_had(self):
        before = Config(GLOBAL, layer_quant_config={"*k_proj": LATER}, exclude=["*.0.*", "lm_head"])
        config = with_layers(LINEARS, before, {Q0: NAMED, K0: TYPE})
        assert list(config.layer_quant_config) == [Q0, K0, "*k_proj"]
        assert config.exclude == [DOWN0, "lm_head"]
        assert assign(LINEARS, config) == assign(LINEARS, before) | {Q0: NAMED, K0: TYPE}


@pytest.mark.parametrize(
    "by_type", [{}, {nn.Linear: TYPE}, {nn.Embedding: TYPE}], ids=["none", "linear", "embedding"]
)
def test_no_type_stands_for_a_linear_layer(by_type):
    config = Config(GLOBAL, layer_type_quant_config=by_type)
    assert config_for("a", None, config) is config_for("a", nn.Linear, config)
    assert config_for("a", None, config) is (TYPE if nn.Linear in by_type else GLOBAL)
