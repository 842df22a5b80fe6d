"""drivers/generate.py with a folder of transformers.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import re
import signal

import psutil
import pytest
import torch
import transformers
from helpers import SECONDS, assert_one_line_each, drive_each
from killing import family, kill, start
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from a2d_mpi.cli.models import Tokenizer

PROMPT = "To be, or not to be"


def save(folder, vocab=256, **options):
    """Save a small Llama whose tokens are bytes; return it."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
        eos_token_id=None, bos_token_id=None, pad_token_id=0,
        **{"max_position_embeddings": 400} | options,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save(path)
    return path


# Tell the grid.
GRID = """
from a2d_mpi.cli import run as generate
real = generate.ProcessGrid
def told(*given):
    print(f"rank {rank}: grid", *given[1:], file=sys.stderr)
    return real(*given)
generate.ProcessGrid = told
"""


def test_text_and_refusals(folder, tmp_path):
    """Each prompt gets the sampled tokens of one process; a cache of all tokens but the last.

    The grid is the one with the fewest bytes: keys of few heads are sent.
    """
    file = tmp_path / "prompt.txt"
    file.write_bytes(bytes(range(1, 200)))
    model, expected = transformers.AutoModelForCausalLM.from_pretrained(folder), []
    for prompt in (file.read_bytes(), PROMPT.encode()):
        torch.manual_seed(3)
        ids = torch.tensor([[*prompt]])
        made = model.generate(ids, max_new_tokens=9, do_sample=True, temperature=0.7)
        expected.append(bytes(made[0, ids.shape[1] :].tolist()).decode(errors="replace"))
    options = ["--prompt-file", file, "--prompt", PROMPT, "--tokens", 9]
    options += ["--temperature", 0.7, "--seed", 3]

    save(tmp_path / "odd", 300)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.json").write_text("{}")
    (tmp_path / "empty").touch()
    save(tmp_path / "few", 100)
    words = FastTokenizer(WordLevel({"<unk>": 0, "a": 1, "far": 100}, "<unk>"))
    words.pre_tokenizer = Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    fast.save_pretrained(tmp_path / "few")
    mine = ["--prompt", "x"]
    refused = [
        ([folder], [], "give --prompt or --prompt-file"),
        ([folder, "--prompt", ""], [], "--prompt must not be empty"),
        ([folder, "--prompt-file", tmp_path / "empty"], [], "must not be empty"),
        ([folder, "--prompt-file", tmp_path / "no"], [], "No such file"),
        ([folder, *mine, "--room", "1,2"], [], "tokens for each of the 3 ranks"),
        ([folder, *mine, "--room", "40,40,2"], [], "do not fit"),
        ([folder, *mine, "--room", "1,2,3"], ["--room", "1,3,3"], "on --room"),
        ([folder, *mine, "--tokens", 401], [], "1 tokens and 401 new ones"),
        ([tmp_path / "odd", *mine], [], "a vocabulary of 256, got 300"),
        ([tmp_path / "none", *mine], [], "none"),
        ([tmp_path / "few", "--prompt", "a far"], [], "0 to 99, got 100"),
    ]
    cases = [("generate.py", [folder, *options], [])]
    cases += [("generate.py", *x[:2]) for x in refused]
    done, said = drive_each(cases, 3, GRID, timeout=300)
    assert [code for code, _ in said] == [0, *[2] * len(refused)], done.stderr
    assert_one_line_each(done, [x for *_, x in refused])
    assert "rank 0: grid 3 1 1 rcu" in done.stderr
    text = r"--- prompt 0\n(.*)\n\n199 tokens .*\n--- prompt 1\n(.*)\n\n19 tokens .*tokens/s "
    found = re.fullmatch(text + r"\(9 in all\); .*\n", said[0][1], re.DOTALL)
    assert found, said[0]
    assert [*found.groups()] == [re.sub(r"\r\n?", "\n", x) for x in expected]
    kept = [int(x) for x in re.findall(r"all\); (\d+) bytes of cache", said[0][1])]
    token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, elements, bytes
    assert all(x >= token * -(-n // 3) for x, n in zip(kept, (207, 27))), kept


def test_bytes_are_streamed(capsys):
    """Bytes are printed as they come, with new lines."""
    streamer = transformers.TextStreamer(Tokenizer())
    text = "A line\n\né and 中.\n"
    for x in text.encode():
        streamer.put(torch.tensor([x]))
    streamer.end()
    assert capsys.readouterr().out == text + "\n"


@pytest.mark.launches
def test_ctrl_c(tmp_path):
    """Ctrl-C ends all ranks in the middle of the text, which would take minutes."""
    save(tmp_path, max_position_embeddings=100_000)
    # Sampled bytes have spaces: a streamer prints words.
    options = ["--prompt", PROMPT, "--tokens", 90_000, "--temperature", 1]
    job = start(2, tmp_path, *options, program="generate.py")
    try:
        assert job.stdout.read(1)  # the text has begun
        processes, ranks = family(job)
        assert len(ranks) == 2
        job.send_signal(signal.SIGINT)
        stdout, stderr = job.communicate(timeout=SECONDS)
        assert "tokens/s" not in stdout and "Traceback" not in stderr
        psutil.wait_procs(processes[1:], 5)
        assert not any(x.is_running() for x in ranks)
    finally:
        kill(family(job)[0] if job.poll() is None else [])
