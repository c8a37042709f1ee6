"""A script may end in the middle of anything that it holds: the process ends promptly, and says nothing of its own."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from replaylens.engine.request.sampling import Sampling
from tests.toy_model import engine
subject = engine(cache_tokens=512)
drawn = Sampling(temperature=1.0, ignore_eos=True)
stream = iter(subject.prompt([1, 2, 3], sites=["blocks.0.hook_out"]).stream(20, sampling=drawn))
next(stream)
rollouts = subject.prompt([1, 2, 3]).stream_rollouts(20, at=[3], max_new=8, wave=4, sampling=drawn)
next(rollouts)
with_branch = subject.prompt([4, 5]).__enter__()
"""


@pytest.mark.parametrize(("ending", "code"), [("", 0), ("sys.exit(7)", 7)])
def test_streams_and_rollouts_under_way(ending: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT + ending], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
