"""GPUs and dormant copies that each placement takes or drops."""

import pytest

from glowplug.domain.instance import InstanceState
from glowplug.policies.placement import first_fit
from glowplug.policies.placement.dormant import grow, with_drops
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug_lab.policies import muxserve_like, warmserve_placement
from tests.fleet_builder import MIB, a_model, a_node, an_instance


def seen(*nodes, copies=(), **fields):
    return PlacementView(now_s=9.0, nodes=nodes, dormant={"node-1": copies}, **fields)


def replica(instance_id, model, mib=100, *, gpu=0, state=InstanceState.PREWARMED, **fields):
    return an_instance(instance_id, model, state, gpu_id=f"node-1/{gpu}", mib=mib, replica=True, **fields)


def placed(place, model, view):
    return place(PlaceRequest(instance_id="i-new", model=model), view)


def gpus(decision):
    return [gpu_id for stage in decision.stages for gpu_id in stage.gpu_ids]


# the baseline of HydraServe section 8.1


def test_first_fit_takes_the_first_gpu_with_enough_memory_by_node_and_index():
    view = seen(a_node("node-2"), a_node("node-1", gpus_mib=(50, 200)))
    decision = placed(first_fit.place, a_model(mib=100), view)
    assert (decision.node_id, decision.gpu_id, decision.num_bytes) == ("node-1", "node-1/1", 100 * MIB)
    assert [r.name for r in decision.rivals] == ["node-1/0", "node-1/1", "node-2/0"]


@pytest.mark.parametrize(("reserved", "wanted"), [({}, "node-1/0"), ({"node-1/0": 1}, "")])
def test_first_fit_counts_grants_and_reservations(reserved, wanted):
    view = seen(a_node(gpus_mib=(300,), grants={0: [("i-9", 150)]}), reserved=reserved)
    assert placed(first_fit.place, a_model(mib=150), view).gpu_id == wanted


def test_first_fit_leaves_a_gpu_whose_bytes_are_promised():
    view = seen(a_node(gpus_mib=(150, 150)), reserved={"node-1/0": 1})
    assert placed(first_fit.place, a_model(mib=150), view).gpu_id == "node-1/1"


def test_full_now_is_not_impossible():
    decision = placed(first_fit.place, a_model(mib=100), seen(a_node(gpus_mib=(300,), grants={0: [("i-9", 300)]})))
    assert decision.gpu_id == "" and decision.possible


PAIR_NODES = (a_node("node-1", gpus_mib=(100, 300)), a_node("node-2", gpus_mib=(100, 300, 10, 300)))


@pytest.mark.parametrize(
    ("model", "nodes", "reason"),
    [
        (a_model(mib=301), [a_node()], "no GPU is large enough: 301 MiB are needed, and the largest has 300 MiB"),
        (
            a_model(mib=602, num_gpus=2),
            PAIR_NODES,
            "no GPU is large enough: 301 MiB are needed, and the largest has 300 MiB",
        ),
        (a_model(), [a_node(gpus_mib=())], "no GPU is large enough: 100 MiB are needed, and the largest has 0 B"),
        (a_model(engine="vllm"), [a_node()], "no node can start engine vllm"),
        (a_model(), [], "no node has joined"),
        (a_model(mib=900, num_gpus=3), PAIR_NODES, "no node has 3 GPUs of 300 MiB each"),
    ],
)
def test_first_fit_says_why_a_start_is_impossible(model, nodes, reason):
    decision = placed(first_fit.place, model, seen(*nodes))
    assert not decision.possible and decision.reason == reason


def test_first_fit_says_why_each_gpu_is_taken_or_not():
    nodes = [
        a_node("node-1", gpus_mib=(99, 300, 100)), a_node("node-2", gpus_mib=(300, 300)),
        a_node("node-3", draining=True), a_node("node-4", engines=()), a_node("node-5", grants={0: [("i-9", 201)]}),
    ]  # fmt: skip
    decision = placed(first_fit.place, a_model(mib=100), seen(*nodes))
    assert [(r.name, r.why) for r in decision.rivals] == [
        ("node-1/0", "100 MiB are needed"),
        ("node-1/1", "it is the first with enough free memory"),
        ("node-1/2", "it has enough free memory too"),
        ("node-2/0", "it has enough free memory too"),
        ("node-2/1", "it has enough free memory too"),
        ("node-3/0", "its node is being drained"),
        ("node-4", "it cannot start engine emulated"),
        ("node-5/0", "100 MiB are needed"),
    ]
    assert decision.reason == "this is the first GPU with 100 MiB free"
    view, model = seen(*nodes), a_model(mib=100)
    for most in (2, 4, 6, 7):
        fewer = first_fit.fit(model, view.fleet, first_fit.FirstFitParams(max_rivals=most))
        assert fewer.rivals == decision.rivals[:most]


@pytest.mark.parametrize(
    ("num_gpus", "held_mib", "reason"),
    [
        (1, 201, "no GPU has 100 MiB free"),
        (2, 201, "no 2 GPUs of one node have 100 MiB free"),
        (2, 200, "these are the first 2 GPUs of one node with 100 MiB free"),
    ],
)
def test_first_fit_says_what_is_free(num_gpus, held_mib, reason):
    full = a_node(gpus_mib=(300, 300), grants={n: [("i-9", held_mib)] for n in (0, 1)})
    decision = placed(first_fit.place, a_model(mib=100 * num_gpus, num_gpus=num_gpus), seen(full))
    assert decision.possible and decision.reason == reason


def test_first_fit_names_the_nodes_that_cannot_start_the_engine():
    (rival,) = placed(first_fit.place, a_model(engine="vllm"), seen(a_node())).rivals
    assert (rival.name, rival.why) == ("node-1", "it cannot start engine vllm")


def test_first_fit_gives_a_draining_node_nothing():
    assert placed(first_fit.place, a_model(), seen(a_node(draining=True))).gpu_id == ""


def test_first_fit_takes_the_gpus_of_one_node_for_a_model_of_several():
    (stage,) = placed(first_fit.place, a_model(mib=301, num_gpus=2), seen(*PAIR_NODES)).stages
    assert (stage.gpu_ids, stage.bytes_per_gpu) == (("node-2/1", "node-2/3"), -(-301 * MIB // 2))


# MuxServe (WarmServe section 7.1)


def test_muxserve_like_takes_the_gpus_that_the_fewest_share():
    """Section 7.1: "collocates models on GPUs"."""
    shared_by_two = a_node("node-1", gpus_mib=(900, 900), grants={0: [("i-8", 10)], 1: [("i-9", 10)]})
    shared_by_one = a_node("node-2", gpus_mib=(900, 900), grants={0: [("i-7", 400)], 1: [("i-7", 400)]})
    decision = placed(muxserve_like.place, a_model(mib=200, num_gpus=2), seen(shared_by_two, shared_by_one))
    assert gpus(decision) == ["node-2/0", "node-2/1"], "one engine over both shares with less than two"
    assert [rival.score for rival in decision.rivals] == [1, 2]


def test_muxserve_like_counts_bytes_that_are_promised_as_shared_and_as_gone():
    view = seen(a_node(gpus_mib=(300, 300)), reserved={"node-1/0": 1})
    assert placed(muxserve_like.place, a_model(mib=100), view).gpu_id == "node-1/1"


@pytest.mark.parametrize(
    ("weights_mib", "kv_mib", "held_mib", "granted_mib"),
    [(100, 900, 0, 550), (100, 900, 550, 275), (50, 50, 0, 100)],
    ids=["half of the 900 beside the weights", "half of the 350 that are left", "never more than it asks for"],
)
def test_muxserve_like_divides_the_kv_space(weights_mib, kv_mib, held_mib, granted_mib):
    """Section 2.1: "GPU sharing limits the KV cache space of each model"."""
    node = a_node(gpus_mib=(1000,), grants={0: [("i-1", held_mib)]} if held_mib else {})
    model = a_model(mib=weights_mib, kv_bytes=kv_mib * MIB)
    assert placed(muxserve_like.place, model, seen(node)).stages[0].bytes_per_gpu == granted_mib * MIB


def test_muxserve_like_finds_memory_at_once_or_never():
    """Section 7.3: a "static model placement strategy"."""
    full = seen(a_node(gpus_mib=(300,), grants={0: [("i-9", 200)]}))
    decision = placed(muxserve_like.place, a_model(mib=200), full)
    assert not decision.stages and not decision.possible and "nobody leaves" in decision.reason
    assert not placed(muxserve_like.place, a_model(mib=100), seen(a_node(draining=True))).stages
    assert not placed(muxserve_like.place, a_model(mib=100, engine="vllm"), seen(a_node())).stages


def test_an_instance_grows_from_its_copy_and_the_worth_least_beside_it_gives_way():
    """WarmServe section 5.2, last paragraph."""
    node = a_node(gpus_mib=(300,), grants={0: [("r-own", 100), ("r-a", 80), ("r-b", 80)]})
    copies = [replica("r-own", "m"), replica("r-a", "a", 80), replica("r-b", "b", 80)]
    decision = placed(grow, a_model("m", mib=220), seen(node, copies=copies, scores={"r-a": 0.2, "r-b": 0.9}))
    assert (decision.source, decision.drops, decision.gpu_id) == ("r-own", ("r-a",), "node-1/0")
    assert decision.num_bytes == 220 * MIB
    assert decision.reason == "a copy of its weights is prewarmed there"
    (rival,) = decision.rivals
    assert (rival.name, rival.score, rival.why) == ("r-own", 0.2, "it is prewarmed, and 1 other replica gives way")
    both = placed(grow, a_model("m", mib=300), seen(node, copies=copies))
    assert [rival.why for rival in both.rivals] == ["it is prewarmed, and 2 other replicas give way"]


def test_a_copy_is_told_among_those_that_cannot_grow():
    node = a_node(gpus_mib=(300, 300), grants={0: [("r-1", 100), ("i-9", 150)], 1: [("r-2", 100)]})
    decision = placed(grow, a_model("m", mib=200), seen(node, copies=[replica("r-1", "m"), replica("r-2", "m", gpu=1)]))
    assert [(rival.name, rival.why) for rival in decision.rivals] == [
        ("r-1", "there is not enough free memory beside it"),
        ("r-2", "it is prewarmed"),
    ]


@pytest.mark.parametrize(
    ("node", "copy", "model"),
    [
        ({"draining": True}, {}, {}),
        ({"node_id": "node-2"}, {}, {}),
        ({}, {"gpu": 7}, {}),
        ({}, {}, {"num_gpus": 2}),
        ({}, {"engine": "vllm"}, {}),
    ],
    ids=["a draining node", "a node that is gone", "a GPU that is gone", "for one GPU", "of another engine"],
)
def test_nothing_grows_from_a_copy_that_cannot_be_used(node, copy, model):
    node, rows = a_node(**({"gpus_mib": (300, 300)} | node)), [replica("r-1", "m", **copy)]
    assert placed(grow, a_model("m", **model), seen(node, copies=rows)) is None


def test_a_ready_copy_goes_before_one_asleep_and_one_on_its_way():
    node = a_node(gpus_mib=(300, 300, 300), grants={0: [("r-1", 100)], 2: [("r-3", 100)]})
    asleep = an_instance("i-2", "m", InstanceState.SWAPPED_OUT, gpu_id="node-1/1")
    copies = [replica("r-1", "m", state=InstanceState.LOADING), asleep, replica("r-3", "m", gpu=2)]
    sources = [placed(grow, a_model("m", mib=150), seen(node, copies=copies[:num])).source for num in (3, 2, 1)]
    assert sources == ["r-3", "i-2", "r-1"]


def test_a_copy_of_an_older_revision_or_on_a_full_gpu_is_none():
    node = a_node(gpus_mib=(300,), grants={0: [("r-1", 100), ("i-9", 150)]})
    assert placed(grow, a_model("m", mib=200), seen(node, copies=[replica("r-1", "m")])) is None
    old = replica("r-1", "m", model_revision=7)
    assert placed(grow, a_model("m", revision=8), seen(node, copies=[old])) is None


def test_replicas_are_dropped_where_they_are_worth_least_and_none_needlessly():
    node = a_node(gpus_mib=(300, 300), grants={0: [("r-1", 200)], 1: [("r-2", 30), ("r-3", 170), ("r-4", 90)]})
    copies = [replica("r-1", "a", 200), *(replica(f"r-{n}", f"m{n}", gpu=1) for n in (2, 3, 4))]
    scores = {"r-1": 5.0, "r-2": 0.1, "r-3": 0.5, "r-4": 2.0}
    decision = placed(with_drops, a_model("new", mib=180), seen(node, copies=copies, scores=scores))
    assert (decision.gpu_id, decision.drops) == ("node-1/1", ("r-3",)), "with r-3 gone, r-2 is not in the way"
    assert decision.reason == "180 MiB are free there once 1 replica of other models gives way"
    more = placed(with_drops, a_model("new", mib=210), seen(node, copies=copies, scores=scores))
    assert more.drops == ("r-2", "r-3")
    assert more.reason == "210 MiB are free there once 2 replicas of other models give way"


def test_of_replicas_worth_the_same_the_first_goes_on_the_first_node_and_only_where_bytes_lack():
    nodes = [a_node(n, grants={0: [(f"{n}-a", 100), (f"{n}-b", 100)]}) for n in ("node-2", "node-1")]
    rows = {n: [an_instance(f"{n}-{r}", r, InstanceState.PREWARMED, gpu_id=f"{n}/0", replica=True) for r in "ab"]
            for n in ("node-2", "node-1")}  # fmt: skip
    view = PlacementView(now_s=9.0, nodes=nodes, dormant=rows)
    assert placed(with_drops, a_model("new", mib=200), view).drops == ("node-1-a",)
    assert placed(with_drops, a_model("new", mib=100), view).drops == ()
    byte_more = a_model("new", weights_bytes=100 * MIB + 1)
    assert placed(with_drops, byte_more, view).drops == ("node-1-a",)
    worth = PlacementView(now_s=9.0, nodes=nodes, dormant=rows, scores={"node-1-a": 2.0, "node-1-b": 2.0})
    assert placed(with_drops, a_model("new", mib=200), worth).node_id == "node-2"


def test_a_sleeping_engine_does_not_give_way():
    rows = [replica("r-1", "a", state=InstanceState.SWAPPED_OUT), replica("r-2", "m")]
    view = seen(a_node(grants={0: [("r-1", 200), ("r-2", 50)]}), copies=rows)
    assert placed(with_drops, a_model("new", mib=200), view) is None
    assert placed(grow, a_model("m", mib=200), view) is None


def test_a_running_engine_is_never_dropped():
    node = a_node(gpus_mib=(300,), grants={0: [("i-9", 200), ("r-1", 50)]})
    assert placed(with_drops, a_model("new", mib=200), seen(node, copies=[replica("r-1", "a", 50)])) is None


# WarmServe section 5.2, last paragraph, and section 4

LARGE = a_model("m", mib=300)


def test_a_prewarmed_copy_is_taken_and_what_lies_with_it_loses_its_place():
    node = a_node(gpus_mib=(300, 300), grants={0: [("r-a", 100)], 1: [("r-m", 100), ("r-b", 100)]})
    copies = [replica("r-a", "a"), replica("r-m", "m", gpu=1), replica("r-b", "b", gpu=1)]
    decision = placed(warmserve_placement.place, LARGE, seen(node, copies=copies, scores={"r-b": 9.0, "r-a": 0.1}))
    assert (decision.source, decision.drops, decision.gpu_id) == ("r-m", ("r-b",), "node-1/1")


def test_without_a_copy_the_group_whose_scores_add_up_to_least():
    node = a_node(gpus_mib=(300, 300, 300), grants={0: [("r-a", 100)], 1: [("r-b", 100)], 2: [("i-9", 300)]})
    copies = [replica("r-a", "a"), replica("r-b", "b", gpu=1)]
    view = seen(node, copies=copies, scores={"r-a": 2.0, "r-b": 1.0})
    assert placed(warmserve_placement.place, LARGE, view).drops == ("r-b",)
    assert placed(warmserve_placement.unplaced, LARGE, view).drops == ("r-a",), "the ablation takes the first"


def test_gpus_of_running_instances_and_those_promised_are_no_candidates():
    node = a_node(gpus_mib=(300, 300), grants={0: [("i-9", 10)]})
    assert placed(warmserve_placement.place, LARGE, seen(node)).gpu_id == "node-1/1"
    full = placed(warmserve_placement.place, LARGE, seen(node, reserved={"node-1/1": 10}))
    assert full.stages == () and full.possible and "that serves nobody" in full.reason


def test_what_is_promised_to_a_replica_on_its_way_does_not_close_a_gpu():
    coming = replica("r-a", "a", state=InstanceState.STARTING)
    view = seen(a_node(gpus_mib=(300,)), copies=[coming], reserved={"node-1/0": coming.workers[0].num_bytes})
    assert placed(warmserve_placement.place, LARGE, view).drops == ("r-a",)


def test_a_tensor_group_takes_gpus_of_one_node_that_are_all_free():
    view = seen(a_node(gpus_mib=(300, 300, 300), grants={1: [("i-9", 300)]}))
    decision = placed(warmserve_placement.place, a_model("m", mib=500, num_gpus=2), view)
    assert gpus(decision) == ["node-1/0", "node-1/2"]
