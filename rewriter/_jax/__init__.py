"""The only folder that touches JAX internals.

A module holds one kind of need. A function answers one need, and a comment names each
difference between the supported versions (0.10.2, 0.11.2, 0.12). The engine calls them
as ``_jax.name``: this file lists the names. From the first module to the last:

- `values`: sizes, literals, tracers and constants.
- `calls`: equations that hold a body.
- `library_rules`: derivative rules of JAX's own functions.
- `lines`: lines of the user's files, and names in profiles.
- `messages`: what JAX tells in its log.
- `programs`: jaxprs with other variables, equations or results.
- `jit`: functions under `jax.jit`, and their programs.
- `types`: weak types, varying axes, shardings.
- `meshes`: traces code where values are placed on a mesh.
- `without_calls`: programs without the calls in them.
- `derivatives`: gradients of code.
- `shard_map`: the parts of arrays, one for each device.
- `lowering`: rules of primitives, devices, failures.
- `nvidia`: cuDNN and CUPTI.
"""

from rewriter._jax.calls import (
    BODIES as BODIES,
)
from rewriter._jax.calls import (
    BODY_NAMES as BODY_NAMES,
)
from rewriter._jax.calls import (
    CALLS as CALLS,
)
from rewriter._jax.calls import (
    CUSTOM as CUSTOM,
)
from rewriter._jax.calls import (
    NAMED_RULES as NAMED_RULES,
)
from rewriter._jax.calls import (
    REMAT as REMAT,
)
from rewriter._jax.calls import (
    as_function as as_function,
)
from rewriter._jax.calls import (
    call_body as call_body,
)
from rewriter._jax.calls import (
    call_body_name as call_body_name,
)
from rewriter._jax.calls import (
    call_kind as call_kind,
)
from rewriter._jax.calls import (
    counts_inputs as counts_inputs,
)
from rewriter._jax.calls import (
    function_name as function_name,
)
from rewriter._jax.calls import (
    integer_division as integer_division,
)
from rewriter._jax.calls import (
    is_recomputation as is_recomputation,
)
from rewriter._jax.calls import (
    named_rule as named_rule,
)
from rewriter._jax.calls import (
    of_kind as of_kind,
)
from rewriter._jax.calls import (
    scan_parts as scan_parts,
)
from rewriter._jax.calls import (
    while_parts as while_parts,
)
from rewriter._jax.calls import (
    while_test as while_test,
)
from rewriter._jax.calls import (
    with_constants_first as with_constants_first,
)
from rewriter._jax.derivatives import (
    gradients_of as gradients_of,
)
from rewriter._jax.derivatives import (
    linearized as linearized,
)
from rewriter._jax.jit import (
    asking as asking,
)
from rewriter._jax.jit import (
    inlined as inlined,
)
from rewriter._jax.jit import (
    is_jitted as is_jitted,
)
from rewriter._jax.jit import (
    jit_options as jit_options,
)
from rewriter._jax.jit import (
    jitted_function as jitted_function,
)
from rewriter._jax.jit import (
    options_given as options_given,
)
from rewriter._jax.jit import (
    program_of as program_of,
)
from rewriter._jax.jit import (
    static_arguments as static_arguments,
)
from rewriter._jax.library_rules import (
    is_library_rule as is_library_rule,
)
from rewriter._jax.library_rules import (
    rule_function as rule_function,
)
from rewriter._jax.lines import (
    hide_source_folder as hide_source_folder,
)
from rewriter._jax.lines import (
    is_of_gradient as is_of_gradient,
)
from rewriter._jax.lines import (
    scoped as scoped,
)
from rewriter._jax.lines import (
    source_of as source_of,
)
from rewriter._jax.lines import (
    users_source_of as users_source_of,
)
from rewriter._jax.lowering import (
    check_as_written as check_as_written,
)
from rewriter._jax.lowering import (
    exported as exported,
)
from rewriter._jax.lowering import (
    is_partitioned as is_partitioned,
)
from rewriter._jax.lowering import (
    lower_with_devices as lower_with_devices,
)
from rewriter._jax.lowering import (
    lowering_state as lowering_state,
)
from rewriter._jax.lowering import (
    rolled_back_on_failure as rolled_back_on_failure,
)
from rewriter._jax.meshes import (
    in_mesh_of as in_mesh_of,
)
from rewriter._jax.meshes import (
    is_on_mesh as is_on_mesh,
)
from rewriter._jax.meshes import (
    on_one_device as on_one_device,
)
from rewriter._jax.meshes import (
    placed_as as placed_as,
)
from rewriter._jax.meshes import (
    reshaped as reshaped,
)
from rewriter._jax.meshes import (
    separate_trace as separate_trace,
)
from rewriter._jax.meshes import (
    trace_flat as trace_flat,
)
from rewriter._jax.meshes import (
    trace_placed as trace_placed,
)
from rewriter._jax.meshes import (
    without_mesh as without_mesh,
)
from rewriter._jax.meshes import (
    zeros as zeros,
)
from rewriter._jax.messages import (
    silence_repeated_misses as silence_repeated_misses,
)
from rewriter._jax.nvidia import (
    NothingSeen as NothingSeen,
)
from rewriter._jax.nvidia import (
    has_cupti as has_cupti,
)
from rewriter._jax.nvidia import (
    kernel_seconds as kernel_seconds,
)
from rewriter._jax.nvidia import (
    refusal_of_cudnn as refusal_of_cudnn,
)
from rewriter._jax.programs import (
    Var as Var,
)
from rewriter._jax.programs import (
    check_types as check_types,
)
from rewriter._jax.programs import (
    new_var as new_var,
)
from rewriter._jax.programs import (
    part_of as part_of,
)
from rewriter._jax.programs import (
    pruned as pruned,
)
from rewriter._jax.programs import (
    reading as reading,
)
from rewriter._jax.programs import (
    with_atoms as with_atoms,
)
from rewriter._jax.programs import (
    with_constants as with_constants,
)
from rewriter._jax.programs import (
    with_equations as with_equations,
)
from rewriter._jax.programs import (
    with_one_variable as with_one_variable,
)
from rewriter._jax.programs import (
    with_signature as with_signature,
)
from rewriter._jax.programs import (
    without_constants as without_constants,
)
from rewriter._jax.shard_map import (
    is_parts as is_parts,
)
from rewriter._jax.shard_map import (
    is_typed_part as is_typed_part,
)
from rewriter._jax.shard_map import (
    manual_axes as manual_axes,
)
from rewriter._jax.shard_map import (
    mapped as mapped,
)
from rewriter._jax.shard_map import (
    parts_of as parts_of,
)
from rewriter._jax.shard_map import (
    returning_more_parts as returning_more_parts,
)
from rewriter._jax.shard_map import (
    with_parts as with_parts,
)
from rewriter._jax.types import (
    explicit_mesh as explicit_mesh,
)
from rewriter._jax.types import (
    in_one_mesh as in_one_mesh,
)
from rewriter._jax.types import (
    on_explicit_axes as on_explicit_axes,
)
from rewriter._jax.types import (
    partly_manual_mesh as partly_manual_mesh,
)
from rewriter._jax.types import (
    same_types as same_types,
)
from rewriter._jax.types import (
    shaped_like as shaped_like,
)
from rewriter._jax.types import (
    sharding_in_type as sharding_in_type,
)
from rewriter._jax.types import (
    stated as stated,
)
from rewriter._jax.types import (
    weakly_typed as weakly_typed,
)
from rewriter._jax.types import (
    with_common_varying as with_common_varying,
)
from rewriter._jax.types import (
    without_varying as without_varying,
)
from rewriter._jax.values import (
    consts_of as consts_of,
)
from rewriter._jax.values import (
    holds_tracers as holds_tracers,
)
from rewriter._jax.values import (
    is_drop as is_drop,
)
from rewriter._jax.values import (
    is_key as is_key,
)
from rewriter._jax.values import (
    is_literal as is_literal,
)
from rewriter._jax.values import (
    is_opaque as is_opaque,
)
from rewriter._jax.values import (
    is_staging as is_staging,
)
from rewriter._jax.values import (
    is_tracer as is_tracer,
)
from rewriter._jax.values import (
    is_tracing as is_tracing,
)
from rewriter._jax.values import (
    keeps_precision as keeps_precision,
)
from rewriter._jax.values import (
    literals_of as literals_of,
)
from rewriter._jax.values import (
    never_larger as never_larger,
)
from rewriter._jax.values import (
    same_literal as same_literal,
)
from rewriter._jax.values import (
    settings_of_kernels as settings_of_kernels,
)
from rewriter._jax.values import (
    size_range as size_range,
)
from rewriter._jax.values import (
    tpu_is_attached as tpu_is_attached,
)
from rewriter._jax.without_calls import (
    trace_without_calls as trace_without_calls,
)
from rewriter._jax.without_calls import (
    without_calls as without_calls,
)
