"""What the programs that make data refuse; files stay whole."""

from helpers import assert_all_refused

SAMPLE = "../data/make_sample.py"
TEXT = "../data/make_text.py"


def test_bad_samples(tmp_path):
    """Bad samples are refused before optional packages are imported."""
    output, text = tmp_path / "sample.h5", tmp_path / "text"
    text.write_text("kept")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("kept")
    model = ["--model", tmp_path]
    assert_all_refused(SAMPLE, 0, [
        (options, [], message)
        for options, message in (
            ([], "arguments are required: output"),
            ([output, "--tokens", "many"], "must be a number of tokens"),
            ([output, "--dtype", "int8"], "invalid choice"),
            (["/nowhere/sample.h5"], "cannot write /nowhere/sample.h5"),
            ([tmp_path], "it is not a regular file"),
            ([text, "--text", text, *model], "it is the input"),
            ([tmp_path / "config.json", *model], "it is the input"),
            ([output, *model], "error: "),  # no package, or no such model
        )
    ])  # fmt: skip
    assert not output.exists() and text.read_text() == "kept"
    assert_all_refused(TEXT, 0, [(["/nowhere/text"], [], "cannot write /nowhere/text")])
