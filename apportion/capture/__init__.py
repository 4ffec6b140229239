"""capture: a training step written in PyTorch becomes a Graph.

In: a step function, a model, an optimizer and a batch. Out: a Program, which is a Graph and its
bindings to the live model and optimizer. Next room: describe, which says what operators compute.
Read capture.py first, then record.py (the trace), normalise.py and decompose/ (fewer kinds of
operators), build_graph.py, optimizer.py (updates) and counter_random.py (numbers that can be cut).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.capture import (
        torch_private as torch_private,
    )
    from apportion.capture.any_update import (
        IS_FIRST as IS_FIRST,
    )
    from apportion.capture.batch_tree import (
        flatten as flatten,
    )
    from apportion.capture.batch_tree import (
        map_tensors as map_tensors,
    )
    from apportion.capture.build_graph import (
        Binding as Binding,
    )
    from apportion.capture.capture import (
        capture as capture,
    )
    from apportion.capture.counter_random import (
        computing_dtype as computing_dtype,
    )
    from apportion.capture.counter_random import (
        index_words as index_words,
    )
    from apportion.capture.counter_random import (
        key_words as key_words,
    )
    from apportion.capture.counter_random import (
        uniform_of_words as uniform_of_words,
    )
    from apportion.capture.counter_random import (
        word_table as word_table,
    )
    from apportion.capture.eager_step import (
        eager_step as eager_step,
    )
    from apportion.capture.fixed_inputs import (
        FixedInput as FixedInput,
    )
    from apportion.capture.functional_twins import (
        functional_twin as functional_twin,
    )
    from apportion.capture.lift_call import (
        LiftedCall as LiftedCall,
    )
    from apportion.capture.lift_call import (
        flatten_arguments as flatten_arguments,
    )
    from apportion.capture.lift_call import (
        lift_call as lift_call,
    )
    from apportion.capture.live_state import (
        LiveState as LiveState,
    )
    from apportion.capture.live_state import (
        live_state as live_state,
    )
    from apportion.capture.optimizer import (
        setting_value as setting_value,
    )
    from apportion.capture.optimizer_step import (
        IN_GROUP as IN_GROUP,
    )
    from apportion.capture.optimizer_step import (
        is_shared as is_shared,
    )
    from apportion.capture.program import (
        Program as Program,
    )
    from apportion.capture.program import (
        batch_leaves as batch_leaves,
    )
    from apportion.capture.program import (
        check_settings as check_settings,
    )
    from apportion.capture.program import (
        setting_of as setting_of,
    )
    from apportion.capture.program import (
        settings_now as settings_now,
    )
    from apportion.capture.program import (
        state_tensor as state_tensor,
    )
    from apportion.capture.record import (
        NOT_REALLY_RANDOM as NOT_REALLY_RANDOM,
    )
    from apportion.capture.reference import (
        EagerState as EagerState,
    )
    from apportion.capture.reference import (
        at_loss_scale as at_loss_scale,
    )
    from apportion.capture.reference import (
        begun_from as begun_from,
    )
    from apportion.capture.reference import (
        capture_as as capture_as,
    )
    from apportion.capture.reference import (
        disturbed_changes as disturbed_changes,
    )
    from apportion.capture.reference import (
        eager_steps as eager_steps,
    )
    from apportion.capture.state_tree import (
        nested_state as nested_state,
    )
    from apportion.capture.stored_state import (
        live_tensors as live_tensors,
    )
    from apportion.capture.stored_state import (
        optimizer_state as optimizer_state,
    )
    from apportion.capture.stored_state import (
        other_names as other_names,
    )
    from apportion.capture.stored_state import (
        put_state as put_state,
    )
    from apportion.capture.stored_state import (
        put_tensor as put_tensor,
    )
    from apportion.capture.stored_state import (
        saved_names as saved_names,
    )
    from apportion.capture.trace import (
        RANDOM_UNIFORM as RANDOM_UNIFORM,
    )
    from apportion.capture.trace import (
        CaptureError as CaptureError,
    )
    from apportion.capture.trace import (
        flat_results as flat_results,
    )
    from apportion.capture.widen import (
        widened as widened,
    )

lazy_face(__name__)
