"""Loops, collectives and bytes read from compiled programs: hand-written ones, and ones whose traffic is known."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

from mwjax.launch import hlo, traffic
from tests.eight_devices import run

# As the TPU compiler prints: the limit of the outer loop is handed in from outside, the inner one counts by two and
# starts at a constant of the outermost computation; one collective is written into two halves of one chain.
PROGRAM = """HloModule jit_f, is_scheduled=true

%inner_body (p.1: (u32[], f32[8,16], u32[])) -> (u32[], f32[8,16], u32[]) {
  %p.1 = (u32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}, u32[]) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p.1), index=0
  %two = u32[]{:T(128)} constant(2)
  %next = u32[]{:T(128)} add(%i, %two)
  %x = f32[8,16]{1,0:T(8,128)} get-tuple-element(%p.1), index=1
  %permute = (f32[8,16]{1,0:T(8,128)}, f32[8,16]{1,0:S(1)}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=1
  %permuted = f32[8,16]{1,0:T(8,128)S(1)} collective-permute-done(%permute)
  %last = u32[] get-tuple-element(%p.1), index=2
  ROOT %out = (u32[], f32[8,16], /*index=2*/u32[]) tuple(%next, %permuted, %last)
}

%inner_condition (p.2: (u32[], f32[8,16], u32[])) -> pred[] {
  %p.2 = (u32[], f32[8,16], u32[]) parameter(0)
  %i.2 = u32[] get-tuple-element(%p.2), index=0
  %limit = u32[] get-tuple-element(%p.2), index=2
  ROOT %less = pred[]{:T(512)} compare(%i.2, %limit), direction=LT
}

%first_half (a: f32[4,16]) -> f32[8,16] {
  %a = f32[4,16]{1,0} parameter(0)
  ROOT %gather.1 = f32[8,16] all-gather(%a), channel_id=7, replica_groups=mesh['x'=2,'y'=4] {'x'}, chain_id="1"
}

%second_half (b: f32[4,16]) -> f32[8,16] {
  %b = f32[4,16]{1,0} parameter(0)
  ROOT %gather.2 = f32[8,16] all-gather(%b), channel_id=7, replica_groups=mesh['x'=2,'y'=4] {'x'}, chain_id="1"
}

%outer_body (p.3: (s32[], f32[8,16], u32[])) -> (s32[], f32[8,16], u32[]) {
  %p.3 = (s32[], f32[8,16]{1,0}, u32[]) parameter(0)
  %n = s32[] get-tuple-element(%p.3), index=0
  %n.copy = s32[] copy(%n)
  %one = s32[] constant(1)
  %n.next = s32[] add(%n.copy, %one)
  %y = f32[8,16]{1,0} get-tuple-element(%p.3), index=1
  %start = u32[] get-tuple-element(%p.3), index=2
  %seven = u32[] constant(7)
  %into = (u32[], f32[8,16], u32[]) tuple(%start, %y, %seven)
  %while.inner = (u32[], f32[8,16], u32[]) while(%into), condition=%inner_condition, body=%inner_body
  %z = f32[8,16]{1,0} get-tuple-element(%while.inner), index=1
  %part = f32[4,16]{1,0} slice(%z), slice={[0:4], [0:16]}
  %half.1 = f32[8,16]{1,0} fusion(%part), kind=kCustom, calls=%first_half
  %half.2 = f32[8,16]{1,0} fusion(%part), kind=kCustom, calls=%second_half
  %sum = f32[8,16]{1,0} all-reduce(%half.2), channel_id=3, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %again = (s32[], f32[8,16], u32[]) tuple(%n.next, %sum, %start)
}

%outer_condition (p.4: (s32[], f32[8,16], u32[])) -> pred[] {
  %p.4 = (s32[], f32[8,16]{1,0}, u32[]) parameter(0)
  %n.4 = s32[] get-tuple-element(%p.4), index=0
  %layers = s32[] constant(36)
  ROOT %less.4 = pred[] compare(%n.4, %layers), direction=LT
}

%add (l: f32[], r: f32[]) -> f32[] {
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %plus = f32[] add(%l, %r)
}

ENTRY %main (arg: f32[8,16]) -> f32[8,16] {
  %arg = f32[8,16]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %zero.copy = s32[] copy(%zero)
  %three = u32[] constant(3)
  %loop = (s32[], f32[8,16], u32[]) tuple(%zero.copy, %arg, %three)
  %while.outer = (s32[], f32[8,16], u32[]) while(%loop), condition=%outer_condition, body=%outer_body
  ROOT %result = f32[8,16]{1,0} get-tuple-element(%while.outer), index=1
}
"""
BLOCK = 8 * 16 * 4


def test_nested_loops_and_halves_of_one_collective() -> None:
    found = traffic.count(hlo.parse(PROGRAM), devices=8)
    inner = 36 * 2  # from 3 to 7 by two
    assert {one.kind: one for one in found.collectives} == {
        "collective-permute": traffic.Collective("collective-permute", inner, inner * BLOCK, inner * BLOCK),
        "all-gather": traffic.Collective("all-gather", 36, 36 * BLOCK, 36 * BLOCK // 2),  # groups of 2
        "all-reduce": traffic.Collective("all-reduce", 36, 36 * BLOCK, 36 * BLOCK * 2 * 3 // 4),  # groups of 4
    }
    assert found.unknown_loops == 0


@pytest.mark.parametrize(
    ("transfer", "sent"),
    [("ALL_REDUCE", 6144), ("REDUCE_SCATTER", 3072), ("ALL_TO_ALL", 3072), ("ALL_GATHER", 12288), ("ONE_TO_ONE", 4096)],
)
def test_what_goes_between_slices(transfer: str, sent: int) -> None:
    """As XLA compiles it for several slices: a transfer to the host, whose runtime does the collective."""
    program = f"""
ENTRY %main (x: f32[1024]) -> f32[1024] {{
  %x = f32[1024]{{0}} parameter(0)
  %after-all = token[] after-all()
  %send = (f32[1024]{{0}}, u32[], token[]) send(%x, %after-all), channel_id=2, is_host_transfer=true, \
frontend_attributes={{_xla_host_transfer_rendezvous="all-reduce.2_0",_xla_megascale_transfer_type="{transfer}"}}
  %recv = (f32[1024]{{0}}, u32[], token[]) recv(%after-all), channel_id=1, is_host_transfer=true, \
frontend_attributes={{_xla_host_transfer_rendezvous="all-reduce.2_0",_xla_megascale_transfer_type="{transfer}"}}
  %send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %recv-done = (f32[1024]{{0}}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  ROOT %result = f32[1024]{{0}} get-tuple-element(%recv-done), index=0
}}
"""
    found = traffic.count(hlo.parse(program), devices=16, slices=4)
    assert found.collectives == (traffic.Collective("between slices", 1, 4096, sent),)
    assert (found.over_links, found.over_network) == (0, sent)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tuple(%zero.copy, %arg, %three)", "tuple(%elsewhere, %arg, %three)"),  # starts where only the data knows
        ("add(%n.copy, %one)", "multiply(%n.copy, %one)"),  # does not count
        ("direction=LT\n}\n\n%add", "direction=NE\n}\n\n%add"),  # ends otherwise
    ],
)
def test_a_loop_that_the_data_decides_counts_once_and_is_said(before: str, after: str) -> None:
    assert before in PROGRAM
    found = traffic.count(hlo.parse(PROGRAM.replace(before, after)), devices=8)
    assert {one.kind: one.number for one in found.collectives} == {
        "collective-permute": 2,
        "all-gather": 1,
        "all-reduce": 1,
    }
    assert found.unknown_loops == 1


@pytest.mark.parametrize(
    ("start", "limit", "step", "direction", "times"),
    [(0, 36, 1, "LT", 36), (0, 36, 5, "LT", 8), (0, 36, 1, "LE", 37), (36, 0, -1, "GT", 36), (5, 5, 1, "LT", 0)],
)
def test_how_often_a_loop_runs(start: int, limit: int, step: int, direction: str, times: int) -> None:
    text = PROGRAM
    for name, old, new in (("zero", 0, start), ("layers", 36, limit), ("one", 1, step)):
        text = text.replace(f"%{name} = s32[] constant({old})", f"%{name} = s32[] constant({new})")
    text = text.replace("compare(%n.4, %layers), direction=LT", f"compare(%n.4, %layers), direction={direction}")
    runs = [e.times for e in hlo.executed(hlo.parse(text)) if e.instruction.name == "sum"]
    assert runs == [times]


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3}}", 4),
        ("{{0,2},{1,3}}", 2),
        ("[4,2]<=[8]", 2),
        ("[2,4]<=[4,2]T(1,0)", 4),
        ("mesh['a'=4,'b'=2,'c'=3] {'a','c'}", 12),
        ("mesh['a'=8] {'a':(2)4}", 4),
    ],
)
def test_group_sizes(groups: str, size: int) -> None:
    attributes = f", channel_id=1, replica_groups={groups}, dimensions={{0}}"
    assert traffic.group_size(hlo.Instruction("x", (), "all-gather", "", attributes, False), 64) == size


def test_nothing_to_read_is_an_error() -> None:
    with pytest.raises(ValueError, match="entry"):
        hlo.parse("something else\n")


def test_loops_of_a_compiled_scan() -> None:
    """On this machine: XLA says how often a scan runs; the products in it run as often."""

    def layers(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    shapes = (jax.ShapeDtypeStruct((16, 32), jnp.float32), jax.ShapeDtypeStruct((7, 32, 32), jnp.float32))
    module = hlo.parse(jax.jit(layers).lower(*shapes).compile().as_text())
    assert [e.unknown for e in hlo.executed(module) if e.instruction.opcode == "while"] == [False]
    products = [e for e in hlo.executed(module) if e.instruction.opcode in ("dot", "custom-call")]
    assert sum(e.times for e in products) == 7


def test_a_loop_of_unknown_length_in_a_compiled_program() -> None:
    def halved(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x)

    module = hlo.parse(jax.jit(halved).lower(jax.ShapeDtypeStruct((64,), jnp.float32)).compile().as_text())
    assert traffic.count(module, 1).unknown_loops == 1


def test_bytes_of_a_program_are_what_it_reads_and_writes() -> None:
    """Without loops, as XLA counts; in a loop that reads a slice of a stack, each slice once."""

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return x @ y

    shapes = (jax.ShapeDtypeStruct((256, 512), jnp.float32), jax.ShapeDtypeStruct((512, 128), jnp.float32))
    compiled = jax.jit(product).lower(*shapes).compile()
    expected = 4 * (256 * 512 + 512 * 128 + 256 * 128)
    assert traffic.count(hlo.parse(compiled.as_text()), 1).hbm_bytes == expected
    assert compiled.cost_analysis()["bytes accessed"] == expected

    def stacked(x: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, row: (x + jnp.sin(row), None), x, rows)[0]

    shapes = (jax.ShapeDtypeStruct((4096,), jnp.float32), jax.ShapeDtypeStruct((100, 4096), jnp.float32))
    found = traffic.count(hlo.parse(jax.jit(stacked).lower(*shapes).compile().as_text()), 1).hbm_bytes
    once = 100 * 4096 * 4
    assert 3 * once <= found < 8 * once  # each row, and the sum in and out; not the whole stack a hundred times


# A layer's matrix is cut out of a stack by a fusion in the fusion that multiplies by it.
NESTED = """
%cut (s.1: f32[28,16,16], n.1: s32[]) -> f32[16,16] {
  %s.1 = f32[28,16,16]{2,1,0} parameter(0)
  %n.1 = s32[] parameter(1)
  %none = s32[] constant(0)
  %one = f32[1,16,16]{2,1,0} dynamic-slice(%s.1, %n.1, %none, %none), dynamic_slice_sizes={1,16,16}
  ROOT %layer = f32[16,16]{1,0} bitcast(%one)
}

%multiply (x.1: f32[8,16], s.2: f32[28,16,16], n.2: s32[]) -> f32[8,16] {
  %x.1 = f32[8,16]{1,0} parameter(0)
  %s.2 = f32[28,16,16]{2,1,0} parameter(1)
  %n.2 = s32[] parameter(2)
  %matrix = f32[16,16]{1,0} fusion(%s.2, %n.2), kind=kLoop, calls=%cut
  ROOT %product = f32[8,16]{1,0} convolution(%x.1, %matrix), dim_labels=bf_io->bf
}

ENTRY %main (x: f32[8,16], s: f32[28,16,16], n: s32[]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  %s = f32[28,16,16]{2,1,0} parameter(1)
  %n = s32[]{:S(6)} parameter(2)
  ROOT %y = f32[8,16]{1,0} fusion(%x, %s, %n), kind=kOutput, calls=%multiply
}
"""


def test_a_slice_that_is_taken_in_a_fusion_of_a_fusion() -> None:
    layer, stack = 16 * 16 * 4, 28 * 16 * 16 * 4
    assert traffic.count(hlo.parse(NESTED), 1).hbm_bytes == 2 * BLOCK + layer
    handed_on = NESTED.replace("dynamic-slice(", "something-else(")
    assert traffic.count(hlo.parse(handed_on), 1).hbm_bytes == 2 * BLOCK + stack
    # What a fusion within hands on as it is, the one around reads.
    line = "ROOT %layer = f32[16,16]{1,0} bitcast(%one)"
    whole = NESTED.replace(line, "ROOT %layer = f32[448,16]{1,0} bitcast(%s.1)")
    assert traffic.count(hlo.parse(whole), 1).hbm_bytes == 2 * BLOCK + stack


SHARDED = """
import json, sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from mwjax.launch import hlo, traffic
from mwjax.model.sharding import make_mesh

mesh = make_mesh(fsdp=4, tensor=2, devices=jax.devices())

def array(shape, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

def body(x, w):
    def layer(x, w):
        w = jax.lax.all_gather(w, "fsdp", axis=0, tiled=True)
        return jax.lax.psum(jnp.tanh(x @ w) @ w.T, "tensor"), None
    x, _ = jax.lax.scan(layer, x, w)
    return jax.lax.psum_scatter(x, "fsdp", scatter_dimension=1, tiled=True)

specs = (P("fsdp", None), P(None, "fsdp", "tensor"))
f = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("fsdp", None), check_vma=False)
compiled = jax.jit(f).lower(array((32, 64), "fsdp", None), array((5, 64, 16), None, "fsdp", "tensor")).compile()
found = traffic.count(hlo.parse(compiled.as_text()), 8)
print(json.dumps([list(one) for one in found.collectives]))
"""


def test_collectives_of_a_compiled_program_with_a_scan() -> None:
    """Five layers, each gathering its [64, 8] weights over 4 devices and summing [8, 64] results over 2; then one
    reduction to [8, 16] over 4."""
    found = {row[0]: row[1:] for row in json.loads(run(SHARDED))}
    weights, results, scattered = 64 * 8 * 4, 8 * 64 * 4, 8 * 16 * 4
    assert found == {
        "all-gather": [5, 5 * weights, 5 * weights * 3 // 4],
        "all-reduce": [5, 5 * results, 5 * results],
        "reduce-scatter": [1, scattered, scattered * 3],
    }
