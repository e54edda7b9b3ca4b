"""Roles: they close at every event, and each rule says what it should in a run small enough to work out by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from traces import AnyRun, TraceBuilder, any_runs

from memdiag.trace import NONE, Kind, Phase, Pool, Role, Trace
from memdiag.trace.ledger import ledger, roles
from memdiag.trace.model import RECOMPUTE
from memdiag.trace.timeline import event_count, lives, of_device, timeline


def roles_of(trace: Trace, allocation: int) -> list[tuple[int, Role]]:
    """What an allocation was, as (from which event on, role)."""
    assigned = roles(trace)
    mine = assigned.allocation == allocation
    return [(int(start), Role(role)) for start, role in zip(assigned.start[mine], assigned.role[mine], strict=True)]


class TestItCloses:
    @given(any_runs())
    def test_roles_sum_to_what_was_alive_after_every_event(self, any_run: AnyRun) -> None:
        # GIVEN any run, and the live bytes that were counted while it was made
        trace = any_run.trace
        # WHEN its roles are summed after each event
        sums = ledger(trace, roles(trace), "cpu")
        # THEN they close to the byte, and nothing is negative
        assert sums.sum(axis=0).tolist() == any_run.live
        assert timeline(trace, "cpu").live.tolist() == any_run.live
        assert (sums >= 0).all()

    @given(any_runs())
    def test_an_allocation_has_one_role_at_a_time_from_birth_to_death(self, any_run: AnyRun) -> None:
        trace = any_run.trace
        life, assigned = lives(trace), roles(trace)
        for allocation in range(trace.rows("allocations")):
            mine = np.flatnonzero(assigned.allocation == allocation)
            # THEN its intervals follow each other without gap or overlap, and none is empty
            bounds = [int(life.born[allocation]), *assigned.end[mine].tolist()]
            assert assigned.start[mine].tolist() == bounds[:-1]
            assert bounds[-1] == life.died[allocation]
            assert (assigned.end[mine] > assigned.start[mine]).all()

    @given(any_runs())
    def test_chosen_events_show_what_all_events_show(self, any_run: AnyRun) -> None:
        trace = any_run.trace
        assigned = roles(trace)
        everything = ledger(trace, assigned, "cpu")
        chosen = np.arange(0, event_count(trace), 3)
        assert np.array_equal(ledger(trace, assigned, "cpu", chosen), everything[:, chosen])
        before = ledger(trace, assigned, "cpu", np.array([NONE]))
        assert before.sum() == timeline(trace, "cpu").start_bytes

    @given(any_runs())
    def test_looking_up_one_moment_agrees_with_the_intervals(self, any_run: AnyRun) -> None:
        trace = any_run.trace
        assigned, life = roles(trace), lives(trace)
        for event in range(NONE, event_count(trace)):
            rows = np.flatnonzero(assigned.at(event))
            found = assigned.of(assigned.allocation[rows], np.full(len(rows), event))
            assert found.tolist() == assigned.role[rows].tolist()
        for allocation in range(trace.rows("allocations")):  # before birth the first role, after death the last
            mine = assigned.role[assigned.allocation == allocation]
            ends = np.array([life.born[allocation] - 1, event_count(trace) + 5])
            assert assigned.of(np.full(2, allocation), ends).tolist() == [mine[0], mine[-1]]

    def test_a_run_without_memory(self) -> None:
        trace = TraceBuilder().build()
        assert ledger(trace, roles(trace), "cpu").shape == (len(Role), 0)

    def test_other_devices_and_pools_are_not_counted(self) -> None:
        run = TraceBuilder(devices=("cpu", "cuda:0"))
        run.allocate(10)
        run.allocate(200, device="cuda:0")
        run.allocate(3000, pool=Pool.MAPPED)
        trace = run.build()
        assert ledger(trace, roles(trace), "cpu").sum(axis=0).tolist() == [10, 10, 10]
        assert ledger(trace, roles(trace), "cuda:0").sum(axis=0).tolist() == [0, 200, 200]


class TestWhereItWasBorn:
    def test_workspace_dies_inside_its_operator(self) -> None:
        run = TraceBuilder()
        with run.phase(Phase.FORWARD), run.module("fc"):
            with run.operator("aten::conv2d"), run.operator("aten::mkldnn_convolution"):
                scratch = run.allocate(10)
                kept = run.allocate(20)
                run.free(scratch)
            run.free(kept)
        trace = run.build()
        assert roles_of(trace, scratch) == [(0, Role.WORKSPACE)]
        assert roles_of(trace, kept) == [(1, Role.OTHER_ACTIVATIONS)]
        # 10, then 10 + 20, then 20, then nothing
        assert ledger(trace, roles(trace), "cpu")[Role.WORKSPACE].tolist() == [10, 10, 0, 0]
        assert ledger(trace, roles(trace), "cpu")[Role.OTHER_ACTIVATIONS].tolist() == [0, 20, 20, 0]

    def test_what_a_module_inside_an_operator_keeps_is_no_workspace_of_that_operator(self) -> None:
        # GIVEN a checkpoint's node in backward, with a module that runs again inside it
        run = TraceBuilder()
        with run.phase(Phase.BACKWARD), run.node("CheckpointFunctionBackward"):
            with run.module("block", flags=RECOMPUTE), run.operator("aten::linear"):
                again = run.allocate(10)
            run.free(again)
        assert roles_of(run.build(), again) == [(0, Role.RECOMPUTED_ACTIVATIONS)]

    def test_optimizer_temporaries_live_across_its_operators_and_die_by_its_end(self) -> None:
        run = TraceBuilder()
        with run.step(), run.phase(Phase.OPTIMIZER):
            with run.operator("aten::_foreach_mul"):
                temporary = run.allocate(10)
            with run.operator("aten::_foreach_add"):
                run.free(temporary)
                kept = run.allocate(20)
        run.free(kept)
        trace = run.build()
        assert roles_of(trace, temporary) == [(0, Role.OPTIMIZER_TEMPORARIES)]
        assert roles_of(trace, kept) == [(2, Role.UNKNOWN)]

    def test_backward_temporaries_die_by_the_end_of_backward(self) -> None:
        run = TraceBuilder()
        with run.phase(Phase.BACKWARD):
            with run.node("AddmmBackward0"):
                passed_on, kept = run.allocate(10), run.allocate(20)
            with run.node("ReluBackward0"):
                run.free(passed_on)
        trace = run.build()
        assert roles_of(trace, passed_on) == [(0, Role.BACKWARD_TEMPORARIES)]
        assert roles_of(trace, kept) == [(1, Role.UNKNOWN)]

    def test_other_activations_of_the_loop_may_wait_for_the_next_turn(self) -> None:
        # GIVEN a loss computed outside the model, replaced by that of the next step, and one that stays for good
        run = TraceBuilder()
        with run.step(), run.phase(Phase.FORWARD):
            loss, history = run.allocate(10), run.allocate(20)
        with run.step(), run.phase(Phase.FORWARD):
            run.free(loss)
            run.allocate(10)
        with run.step():
            pass
        trace = run.build()
        assert roles_of(trace, loss) == [(0, Role.OTHER_ACTIVATIONS)]
        assert roles_of(trace, history) == [(1, Role.UNKNOWN)]

    def test_what_was_born_nowhere_is_unknown(self) -> None:
        run = TraceBuilder()
        nowhere, before = run.allocate(10), run.existing(20)
        trace = run.build()
        assert roles_of(trace, nowhere) == [(0, Role.UNKNOWN)]
        assert roles_of(trace, before) == [(NONE, Role.UNKNOWN)]
        assert ledger(trace, roles(trace), "cpu")[Role.UNKNOWN].tolist() == [30]

    def test_a_span_that_was_never_closed_proves_nothing(self) -> None:
        # GIVEN a process that was killed inside an operator: the operator's row is missing
        run = TraceBuilder()
        with run.operator("aten::mm"):
            inside = run.allocate(10)
            run.free(inside)
        trace = run.build()
        trace.tables["spans"] = {name: column[:0] for name, column in trace["spans"].items()}
        assert roles_of(trace, inside) == [(0, Role.UNKNOWN)]


class TestWhatAutogradSaved:
    def test_saved_activations_until_the_graph_lets_go(self) -> None:
        run = TraceBuilder()
        with run.module("fc"), run.operator("aten::linear"):
            freed, held = run.allocate(10), run.allocate(20)
            first, second, again = run.save(freed), run.save(held), run.save(held)
        run.release(first)
        run.free(freed)  # event 2
        run.release(second)
        run.allocate(1)  # event 3: one save of it is still there
        run.release(again)
        run.allocate(1)  # event 4
        trace = run.build()
        assert roles_of(trace, freed) == [(0, Role.SAVED_ACTIVATIONS)]
        assert roles_of(trace, held) == [(1, Role.SAVED_ACTIVATIONS), (4, Role.OTHER_ACTIVATIONS)]

    def test_a_saved_result_is_never_workspace(self) -> None:
        run = TraceBuilder()
        with run.operator("aten::softmax"):
            result = run.allocate(10)
            run.save(result)
            run.free(result)
        assert roles_of(run.build(), result) == [(0, Role.SAVED_ACTIVATIONS)]

    def test_inputs_are_constants_from_outside_the_model(self) -> None:
        run = TraceBuilder()
        with run.phase(Phase.FORWARD):
            batch, with_history, requires_grad = (run.allocate(10) for _ in range(3))
            with run.module("fc"), run.operator("aten::linear"):
                mask = run.allocate(10)
                run.save(batch, grad=False, leaf=True)
                run.save(mask, grad=False, leaf=True)
                run.save(with_history, grad=False, leaf=False)
                run.save(requires_grad, grad=True, leaf=True)
        trace = run.build()
        assert roles_of(trace, batch) == [(0, Role.INPUTS)]
        for activation in (with_history, requires_grad, mask):
            assert [role for _, role in roles_of(trace, activation)] == [Role.SAVED_ACTIVATIONS]

    def test_recomputed_activations_are_saved_again(self) -> None:
        run = TraceBuilder()
        with run.phase(Phase.BACKWARD), run.module("block", flags=RECOMPUTE), run.operator("aten::linear"):
            again = run.allocate(10)
            run.save(again)
        assert roles_of(run.build(), again) == [(0, Role.RECOMPUTED_ACTIVATIONS)]

    def test_a_save_that_was_unpacked_and_never_released_is_still_saved(self) -> None:
        # GIVEN retained graphs: one save released, one only unpacked
        run = TraceBuilder()
        with run.module("fc"):
            out = run.allocate(10)
            first, second = run.save(out), run.save(out)
        run.release(first)
        run.allocate(1)
        run.release(second)
        trace = run.build()
        trace["save_ends"]["released_event"][1] = NONE
        assert roles_of(trace, out) == [(0, Role.SAVED_ACTIVATIONS)]

    def test_a_save_without_a_known_storage_is_passed_over(self) -> None:
        run = TraceBuilder()
        out = run.allocate(10)
        run.release(run.save(NONE))
        assert roles_of(run.build(), out) == [(0, Role.UNKNOWN)]


class TestWhatWasClaimed:
    def test_a_claim_from_birth_names_it_and_brings_its_proof(self) -> None:
        run = TraceBuilder()
        weight = run.existing(10)
        run.claim(weight, Role.PARAMETERS, "fc.weight", proof="a parameter of the model")
        trace = run.build()
        assigned = roles(trace)
        assert roles_of(trace, weight) == [(NONE, Role.PARAMETERS)]
        assert trace.string(int(assigned.name[0])) == "fc.weight"
        assert assigned.proofs[assigned.proof[0]] == "a parameter of the model"

    def test_a_claim_from_now_on_leaves_the_past(self) -> None:
        run = TraceBuilder()
        with run.module("fc"):
            out = run.allocate(10)  # event 0
        run.allocate(1)  # event 1
        run.claim(out, Role.HELD, "history[0]", from_birth=False)  # known from here: after event 1
        run.allocate(1)
        assert roles_of(run.build(), out) == [(0, Role.OTHER_ACTIVATIONS), (1, Role.HELD)]

    def test_the_strongest_claim_from_birth_wins_whatever_the_order(self) -> None:
        for order in ([Role.INPUTS, Role.PARAMETERS], [Role.PARAMETERS, Role.INPUTS]):
            run = TraceBuilder()
            weight = run.allocate(10)
            for role in order:
                run.claim(weight, role)
            assert roles_of(run.build(), weight) == [(0, Role.PARAMETERS)]

    def test_the_last_of_equal_claims_names_it(self) -> None:
        # GIVEN a parameter that was seen before its name was known
        run = TraceBuilder()
        weight = run.allocate(10)
        run.claim(weight, Role.PARAMETERS, None)
        run.claim(weight, Role.PARAMETERS, "head.weight")
        trace = run.build()
        assert trace.string(int(roles(trace).name[0])) == "head.weight"

    def test_the_later_of_two_claims_at_one_moment_wins(self) -> None:
        run = TraceBuilder()
        buffer = run.allocate(10)
        run.allocate(1)
        run.claim(buffer, Role.GRADIENTS, from_birth=False)
        run.claim(buffer, Role.OPTIMIZER_STATE, from_birth=False)
        assert roles_of(run.build(), buffer) == [(0, Role.UNKNOWN), (1, Role.OPTIMIZER_STATE)]

    def test_a_saved_tensor_that_python_holds_too_is_a_saved_tensor(self) -> None:
        run = TraceBuilder()
        with run.module("fc"):
            out = run.allocate(10)
            run.save(out)
        run.claim(out, Role.HELD, "outputs[0]")
        assert roles_of(run.build(), out) == [(0, Role.SAVED_ACTIVATIONS)]

    def test_a_claim_made_after_the_death_is_nothing(self) -> None:
        run = TraceBuilder()
        gone = run.allocate(10)
        run.free(gone)
        run.allocate(1)
        run.claim(gone, Role.HELD, from_birth=False)
        assert roles_of(run.build(), gone) == [(0, Role.UNKNOWN)]

    def test_every_step_kind_is_the_recorders(self) -> None:
        # The rules look for steps by kind: the number is part of the file format.
        assert (Kind.STEP, Kind.PHASE, Kind.MODULE, Kind.OPERATOR, Kind.NODE, Kind.FUNCTION) == (0, 1, 2, 3, 4, 5)

    def test_the_mask_of_a_device_knows_no_other(self) -> None:
        run = TraceBuilder()
        run.allocate(10)
        assert not of_device(run.build(), "cuda:7").any()
