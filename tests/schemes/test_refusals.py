"""Every reason of every op to refuse a layer is reachable, readable, and listed with the others
(cases from every.py)."""

import ast
import inspect
import sys
import textwrap

import pytest
import torch
from every import (
    CASES,
    DEVICES,
    EVERY,
)

from billfish.errors import UserError
from billfish.kernels import cpu, jit
from billfish.schemes.registry import choose_op, ops_of
from billfish.schemes.w4a16 import W4A16, kleidiai


def questions(op):
    """An op is asked of layers of its own schemes."""
    own = [case for case in CASES if op in ops_of(case[0])]
    return [(*case, device) for case in own for device in DEVICES]


def no_nvrtc():
    raise UserError("not here")


# What this machine may not be: (compute capability of its GPU, whether NVRTC, LLVM and KleidiAI
# may be there).
MACHINES = [None, ((7, 5), True), ((9, 0), True), ((9, 0), False), ((10, 0), True)]


def ask_everything(op):
    for machine in MACHINES:
        with pytest.MonkeyPatch.context() as patch:
            if machine is not None:
                patch.setattr(torch.cuda, "is_available", lambda: True)
                patch.setattr(torch.cuda, "current_device", lambda: 0)
                patch.setattr(torch.cuda, "get_device_capability", lambda index, m=machine: m[0])
                if not machine[1]:
                    patch.setattr(jit, "version", no_nvrtc)
                    patch.setattr(cpu, "find_spec", lambda name: None)
                    patch.setattr(kleidiai, "works", lambda: False)
            yield from (op.refuses(*question) for question in questions(op))


def reached_returns(op):
    """Lines of op.refuses that returned a reason for one of its questions, found by tracing."""
    code, lines = inspect.unwrap(op.refuses).__code__, set()

    def watch(frame, event, value):
        if frame.f_code is code:
            if event == "return" and value is not None:
                lines.add(frame.f_lineno)
            return watch
        return None

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        reasons = [reason for reason in ask_everything(op) if reason]
    finally:
        sys.settrace(before)
    return lines, reasons


@pytest.mark.parametrize("op", sorted({op for s in EVERY for op in ops_of(s)}, key=str), ids=str)
def test_every_refusal_is_reached_and_readable(op):
    lines, reasons = reached_returns(op)
    source, start = inspect.getsourcelines(op.refuses)
    for node in ast.walk(ast.parse(textwrap.dedent("".join(source)))):
        if isinstance(node, ast.Return) and ast.unparse(node) not in ("return None", "return"):
            where = range(start + node.lineno - 1, start + node.end_lineno)
            assert lines & {*where}, f"add a case that reaches {op.name}: {ast.unparse(node)}"
    for reason in set(reasons):
        assert reason.endswith(".") and len(reason.split()) > 5 and "\n" not in reason
        assert "None" not in reason and "Error" not in reason


@pytest.mark.parametrize("device", [torch.device("cuda"), torch.device("cuda:3")], ids=str)
@pytest.mark.parametrize("scheme", EVERY, ids=str)
def test_auto_on_a_gpu_that_no_op_takes_names_every_refusal(scheme, device):
    """No GPU is asked and no tensor exists: a device is only a name here."""
    ops, (n, k) = ops_of(scheme), (64, 768)
    refusals = {op.name: op.refuses(scheme, n, k, device) for op in ops[:-1]}
    if None in refusals.values():
        assert refusals[choose_op(scheme, n, k, device).name] is None
        return
    with pytest.raises(UserError) as error:
        choose_op(scheme, n, k, device)
    text = str(error.value)
    assert f"{n} x {k}" in text and str(device) in text and scheme.name in text
    for name, reason in refusals.items():
        assert f"{name}: {reason}" in text
    assert 'op="reference"' in text
    assert choose_op(scheme, n, k, device, "reference") is ops[-1]
    for name, reason in refusals.items():
        with pytest.raises(UserError) as error:
            choose_op(scheme, n, k, device, name)
        assert reason in str(error.value) and repr(name) in str(error.value)


@pytest.mark.parametrize("scheme", EVERY, ids=str)
def test_choose_on_the_cpu(scheme):
    device = torch.device("cpu")
    assert choose_op(scheme, 64, 768, device).name == "cpu"
    willing = [op for op in ops_of(scheme) if op.refuses(scheme, 64, 768, device) is None]
    assert {op.name for op in willing} >= {"cpu", "reference"}
    for op in willing:
        assert choose_op(scheme, 64, 768, device, op.name) is op
    with pytest.raises(UserError, match=r"op 'marlin9'.*known are auto, .*cpu, .*reference"):
        choose_op(scheme, 64, 768, device, "marlin9")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"bits": 1}, "2 to 8 bits"),
        ({"bits": 9}, "2 to 8 bits"),
        ({"group_size": 0}, "1 or more"),
        ({"group_size": -2}, "1 or more"),
    ],
)
def test_parameters_that_w4a16_refuses(parameters, message):
    with pytest.raises(UserError, match=message):
        W4A16(**parameters)
