import pytest

from expertmesh.core import hlo

SYNC = """
%fused (p: bf16[8]) -> bf16[8] {
  ROOT %sine.1 = bf16[8]{0} sine(%p), metadata={op_name="all-reduce(x)"}
}
ENTRY %main {
  %all_gather.3 = bf16[128,256]{1,0} all-gather(%param.1), channel_id=1, replica_groups=GROUPS, dimensions={0}, metadata={op_name="jit(f)/all_gather" scheduling_name="all-gather-start"}
}
"""  # noqa: E501


@pytest.mark.parametrize(
    "groups, expected",
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ()),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4] {'a','b'}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
    ],
)
def test_every_notation_of_replica_groups(groups, expected):
    (found,) = hlo.collectives(SYNC.replace("GROUPS", groups))
    assert found == ("all-gather", ("bf16[128,256]",), expected, "jit(f)/all_gather")
    assert found.group_size == (len(expected[0]) if expected else 0)


def test_two_parts_of_one_axis_are_refused():
    text = SYNC.replace("GROUPS", "mesh['a'=8] {'a':(1)2,'a':(4)2}")
    with pytest.raises(ValueError, match="two parts"):
        hlo.collectives(text)


ASYNC = """
  %ag = (bf16[4]{0}, bf16[8]{0}) all-gather-start(%p), replica_groups={{0,1}}
  %agd = bf16[8]{0} all-gather-done(%ag)
  %ag2 = ((bf16[4]{0}, f32[1,2]{1,0}), (bf16[8]{0}, f32[2,2]{1,0:T(8,128)})) all-gather-start(%p, %q), replica_groups={{0,1}}
  %ar = f32[] all-reduce-start(%p), replica_groups=[1,2]<=[2], to_apply=%add
  %ar2 = (f32[2]{0}, f32[3]{0}) all-reduce-start(%p, %q), replica_groups=[1,2]<=[2], to_apply=%add
  %ar3 = ((f32[]), f32[]) all-reduce-start(%p), replica_groups=[1,2]<=[2], to_apply=%add
  %cp = (s32[16]{0}, s32[16]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
  %rs = ((f8e4m3fn[64]{0}), f8e4m3fn[32]{0}) reduce-scatter-start(%p), replica_groups={{0,1}}
  ROOT %a2a = (f32[1,16]{1,0}, /*index=1*/f32[1,16]{1,0}) all-to-all(%p, %q), replica_groups={{0,1}}
  %ra = bf16[64,32]{1,0} ragged-all-to-all(%p, %o, %a, %b, %c, %d), replica_groups={{0,1}}
"""  # noqa: E501


def test_async_starts_count_once_with_their_results():
    pair = ((0, 1),)
    assert [found[:3] for found in hlo.collectives(ASYNC)] == [
        ("all-gather", ("bf16[8]",), pair),
        ("all-gather", ("bf16[8]", "f32[2,2]"), pair),
        ("all-reduce", ("f32[]",), pair),
        ("all-reduce", ("f32[2]", "f32[3]"), pair),
        ("all-reduce", ("f32[]",), pair),
        ("collective-permute", ("s32[16]",), ((0, 1), (1, 0))),
        ("reduce-scatter", ("f8e4m3fn[32]",), pair),
        ("all-to-all", ("f32[1,16]", "f32[1,16]"), pair),
        ("ragged-all-to-all", ("bf16[64,32]",), pair),
    ]
    assert hlo.count(ASYNC) == {
        "all-gather": 2,
        "all-reduce": 3,
        "all-to-all": 1,
        "collective-permute": 1,
        "ragged-all-to-all": 1,
        "reduce-scatter": 1,
    }


def test_axes_of_groups():
    mesh = {"a": 2, "one": 1, "b": 2, "c": 2}
    assert hlo.axes_of(((0, 2), (1, 3), (4, 6), (5, 7)), mesh) == ("b",)
    assert hlo.axes_of(((0, 5, 1, 4), (2, 3, 7, 6)), mesh) == ("a", "c")
    assert hlo.axes_of((tuple(range(8)),), mesh) == ("a", "b", "c")
    assert hlo.axes_of(((0, 3), (1, 2), (4, 5), (6, 7)), mesh) is None


@pytest.mark.parametrize(
    "shape, size",
    [("f32[3,5]", 60), ("bf16[7]", 14), ("f8e4m3fn[2,3]", 6), ("f4e2m1fn[6]", 3), ("pred[]", 1)],
)
def test_bytes_of_a_shape(shape, size):
    assert hlo.num_bytes(shape) == size


def test_shapes():
    """Scalars and tuples; no layout and no name."""
    text = "(bf16[8,16]{1,0}, f8e4m3fn[2]{0}) fusion(%p.1, %x.3), calls=%sum, f32[] constant(0)"
    assert hlo.shapes(text) == ("bf16[8,16]", "f8e4m3fn[2]", "f32[]")
