"""Where the kernel tests run: in Triton's interpreter on a CPU (float32), and on a GPU (marker `gpu`) in every dtype."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True, scope="session")
def patched_once() -> Iterator[None]:
    """The interpreter patches `triton.language` for every launch, and again for every call of a function within it.

    That takes more than half of the time. Here it stays patched for those who see the same parts of the language.
    """
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime import interpreter

    patch_lang, languages = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    scopes: dict[Any, Any] = {}
    files: dict[int, Any] = {}

    def once(fn: Any) -> Any:
        if id(fn.__globals__) not in files:
            files[id(fn.__globals__)] = fn.__globals__  # as long as they are kept, no others have their id
            seen = frozenset(lang for lang in languages if any(value is lang for value in fn.__globals__.values()))
            scopes[seen] = scopes.get(seen) or patch_lang(fn)
        return interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        yield
    for scope in reversed(scopes.values()):
        scope.restore()


@pytest.fixture(autouse=True, scope="session")
def types_made_once() -> Iterator[None]:
    """Most of the interpreter's time goes into types of blocks: each is made once here, and what is derived from it is kept.

    Integers are not watched for overflow, which triples every sum of addresses, and cannot happen at these sizes.
    """
    if torch.cuda.is_available():
        yield
        return
    from triton.language import core, semantic
    from triton.runtime import interpreter

    block, tensor, Semantic, Handle = core.block_type, core.tensor, semantic.TritonSemantic, interpreter.TensorHandle
    make_block, make_tensor, equal_types = block.__init__, tensor.__init__, core.dtype.__eq__
    numpy_dtype, broadcast, cast = interpreter._get_np_dtype, Semantic.broadcast_impl_value, Semantic.cast
    constant, expand = Semantic.scalar_constant, Semantic.expand_dims
    fits, unwrap, operands = (
        interpreter._validate_np_data_size,
        core._unwrap_if_constexpr,
        Semantic.binary_op_type_checking_impl,
    )
    blocks: dict[Any, Any] = {}
    dtypes: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    wider: dict[tuple[int, int], Any] = {}
    casts: dict[Any, Any] = {}
    longer, integers = dict[tuple[int, int], Any](), dict[tuple[int, int], Any]()
    sizes: set[tuple[int, str]] = set()
    plain = {tensor, int, float, bool, type(None)}

    def new_block(cls: Any, element: Any, shape: Any) -> Any:
        key = id(element), *(s.value if isinstance(s, core.constexpr) else s for s in shape)  # the type keeps its element
        if key not in blocks:
            blocks[key] = object.__new__(cls)
        return blocks[key]

    def block_once(self: Any, element: Any, shape: Any) -> None:
        if "name" not in self.__dict__:
            make_block(self, element, shape)

    def tensor_of(self: Any, handle: Any, type: Any) -> None:
        derived = type.__dict__.get("_derived")
        if derived is None:
            make_tensor(self, handle, type)
            type._derived = {name: value for name, value in self.__dict__.items() if name != "handle"}
        else:
            self.__dict__.update(derived, handle=handle)

    def dtype_of(type: Any) -> Any:
        scalar = type.scalar
        if isinstance(scalar, core.pointer_type):
            return numpy_dtype(scalar)
        if scalar.name not in dtypes:
            dtypes[scalar.name] = numpy_dtype(scalar)
        return dtypes[scalar.name]

    def broadcast_others(self: Any, a: Any, b: Any) -> Any:
        if a.type is b.type:
            return a, b
        key = id(a.type), id(b.type)
        if key not in wider:
            left, right = broadcast(self, a, b)
            wider[key] = a.type, b.type, left.type, right.type
            return left, right
        return widened(a, wider[key][2]), widened(b, wider[key][3])

    def widened(x: Any, type: Any) -> Any:
        if x.type is type:
            return x
        data = x.handle.data
        if data.dtype != interpreter._get_np_dtype(type):
            data = data.astype(interpreter._get_np_dtype(type))
        return tensor(Handle(spread(data, type.shape.values), x.handle.dtype.scalar), type)

    def spread(data: Any, shape: Any) -> Any:
        """As `np.broadcast_to`, in a quarter of the time."""
        if data.size == 1:
            return np.ndarray(shape, data.dtype, data, 0, (0,) * len(shape))
        if data.ndim == len(shape) and data.flags.c_contiguous:
            steps = tuple([0 if n == 1 else step for n, step in zip(data.shape, data.strides, strict=True)])
            return np.ndarray(shape, data.dtype, data, 0, steps)
        return np.broadcast_to(data, shape)

    def handle_of(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if (data.itemsize, dtype.name) not in sizes:
            self.__post_init__()

    def ir_once(make: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def ir(self: Any, builder: Any) -> Any:
            if "_ir" not in self.__dict__:
                self._ir = make(self, builder)
            return self._ir

        return ir

    def operands_of(self: Any, lhs: Any, rhs: Any, *how: bool, **more: bool) -> Any:
        """Two tensors are cast and widened as others of their types were. A number beside a tensor becomes a constant once,
        unless that casts the tensor."""
        kinds = type(lhs), type(rhs)
        if kinds == (tensor, tensor):
            key = id(lhs.type), id(rhs.type), how, *more.items()
            if key not in casts:
                left, right = operands(self, lhs, rhs, *how, **more)
                casts[key] = lhs.type, rhs.type, left.type.scalar, right.type.scalar  # types that are kept keep their ids
                return left, right
            _, _, left, right = casts[key]
            if lhs.type.scalar is not left:
                lhs = cast_others(self, lhs, left)
            if rhs.type.scalar is not right:
                rhs = cast_others(self, rhs, right)
            return broadcast_others(self, lhs, rhs)
        if tensor not in kinds or not (kinds[0] in (int, float) or kinds[1] in (int, float)):
            return operands(self, lhs, rhs, *how, **more)
        number, place = (lhs, 0) if kinds[1] is tensor else (rhs, 1)
        beside = (rhs, lhs)[place]
        key = id(beside.type), kinds[place], number, place, how, *more.items()
        if key not in constants:
            both = operands(self, lhs, rhs, *how, **more)
            if both[1 - place] is not beside:
                return both
            both[place].handle.data.flags.writeable = False
            constants[key] = beside.type, both[place]
        return (constants[key][1], beside) if place == 0 else (beside, constants[key][1])

    def cast_others(self: Any, x: Any, type: Any, rounding: Any = None) -> Any:
        before, after = x.type.scalar, type.scalar
        if before is after:
            return x
        key = id(x.type), id(after)
        if key in integers:
            return tensor(Handle(x.handle.data.astype(dtype_of(after)), after), integers[key][2])
        made = cast(self, x, type, rounding)
        if before.is_int() and after.is_int() and core.int1 not in (before, after):
            integers[key] = x.type, after, made.type
        return made

    def constant_once(self: Any, value: Any, dtype: Any) -> Any:
        key = type(value), value, id(dtype)
        if key not in constants:
            constants[key] = dtype, constant(self, value, dtype)
            constants[key][1].handle.data.flags.writeable = False
        return constants[key][1]

    def expanded(self: Any, x: Any, axis: int) -> Any:
        key = id(x.type), axis
        if key in longer:
            data = x.handle.data
            shape = *data.shape[:axis], 1, *data.shape[axis:]
            return tensor(Handle(data.reshape(shape), x.handle.dtype.scalar), longer[key][1])
        made = expand(self, x, axis)
        if x.type.is_block():
            longer[key] = x.type, made.type
        return made

    @cache
    def counted(start: int, stop: int) -> Any:
        numbers = np.arange(start, stop, dtype=np.int32)
        numbers.flags.writeable = False
        return numbers

    def fits_once(data: Any, type: Any) -> bool:
        key = data.itemsize, type.name
        if key in sizes:
            return True
        return fits(data, type) and not sizes.add(key)

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in plain or not isinstance(value, (list, tuple, core.tuple, core.constexpr)) else unwrap(value)

    def called_directly(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        """Without the wrappers, which check on every call that the argument below is there."""
        inner = inspect.unwrap(member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.dtype, "__eq__", lambda self, other: self is other or equal_types(self, other))
        patch.setattr(core, "_unwrap_if_constexpr", unwrapped)
        patch.setattr(interpreter, "_validate_np_data_size", fits_once)
        patch.setattr(interpreter, "_patch_attr", called_directly)
        patch.setattr(Semantic, "binary_op_type_checking_impl", operands_of)
        patch.setattr(block, "__new__", new_block)
        patch.setattr(block, "__init__", block_once)
        patch.setattr(block, "to_ir", ir_once(block.to_ir))
        patch.setattr(core.pointer_type, "to_ir", ir_once(core.pointer_type.to_ir))
        patch.setattr(interpreter.tl, "str_to_ty", cache(interpreter.tl.str_to_ty))
        patch.setattr(Handle, "__init__", handle_of)
        patch.setattr(tensor, "__init__", tensor_of)
        patch.setattr(interpreter, "_get_np_dtype", dtype_of)
        patch.setattr(Semantic, "broadcast_impl_value", broadcast_others)
        patch.setattr(Semantic, "cast", cast_others)
        patch.setattr(Semantic, "scalar_constant", constant_once)
        patch.setattr(Semantic, "expand_dims", expanded)
        patch.setattr(
            interpreter.InterpreterBuilder, "create_make_range", lambda self, _, *ends: Handle(counted(*ends), core.int32)
        )
        patch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False))
        yield


@pytest.fixture(autouse=True, scope="session")
def fused_as_on_a_device() -> Iterator[None]:
    """The interpreter computes dots and multiply-adds by NumPy. Here they are the chains that a device computes, so that
    kernels in float32 have the bits of portable arithmetic."""
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from tests.kernels.chains import chain, fused

    def dot(self: object, a: Any, b: Any, d: Any, *_: object) -> Any:
        return TensorHandle(chain(a.data, b.data, d.data), d.dtype.scalar)

    def fma(self: object, x: Any, y: Any, z: Any) -> Any:
        return TensorHandle(fused(x.data, y.data, z.data), z.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", dot)
        patch.setattr(InterpreterBuilder, "create_fma", fma)
        yield


@dataclass(frozen=True)
class Case:
    """A device and a dtype, with what the tests need to know about them."""

    device: str
    dtype: torch.dtype

    def randn(self, *shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
        """Fresh random values, the same for the same seed."""
        draw = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
        return draw.to(self.dtype).to(self.device)

    def ints(self, *shape: int, below: int, seed: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(self.device)

    def tensor(self, values: list, dtype: torch.dtype = torch.int32) -> Tensor:  # type: ignore[type-arg]
        return torch.tensor(values, dtype=dtype, device=self.device)

    def poison(self, *shape: int) -> Tensor:
        """An output filled with NaN: an element that stays unwritten never passes."""
        return torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"

    def close(self, got: Tensor, want: Tensor, slack: float = 1.0) -> None:
        """|got - want| / |want| is within the rounding of the dtype. `want` is float64."""
        bound = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 8e-3}[self.dtype]
        error = ((got.double() - want).norm() / want.norm()).item()
        assert error <= bound * slack, f"relative error {error:.2e}, allowed {bound * slack:.1e}"


CASES = [
    pytest.param(Case("cpu", torch.float32), id="interpreter"),
    *(
        pytest.param(Case("cuda", dtype), id=f"gpu-{name}", marks=pytest.mark.gpu)
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32))
    ),
]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    if found.gpu != torch.cuda.is_available():
        pytest.skip("no GPU" if found.gpu else "the interpreter is for machines without a GPU")
    return found


@pytest.fixture
def same() -> Callable[[Tensor, Tensor], None]:
    """Bitwise equality. Reports the number of differences on failure."""

    def check(a: Tensor, b: Tensor) -> None:
        assert a.shape == b.shape
        assert not a.isnan().any(), "unwritten or broken elements"
        assert torch.equal(a, b), f"{(a != b).sum().item()} of {a.numel()} elements differ"

    return check
