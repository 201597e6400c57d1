import re
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, strategies as st
from typer.testing import CliRunner

from distbelief.cli.main import app
from distbelief.config import algorithms, toml
from distbelief.config.job import ClusterTable, EvaluationTable, Job, Passes, StopTable
from distbelief.config.load import job_from_json, load_job, parse_job
from distbelief.config.presets import PRESETS
from distbelief.core.errors import JobError, JobFileError
from distbelief.parameter_server.policy import ExchangePolicy
from distbelief.parameter_server.rules import SGD, Adagrad, UpdateRule
from distbelief.task.task import DataSpec, ModelSpec
from distbelief.worker.downpour_settings import DownpourSettings
from tests.distbelief.jobs import SPEECH, small, speech
from tests.elsewhere import ended


def mistake(*overrides: str, text: str = SPEECH) -> str:
    with pytest.raises(JobFileError) as caught:
        parse_job(text, path="speech.toml", overrides=overrides)
    return str(caught.value)


def rule_of(job: Job) -> UpdateRule:
    assert isinstance(job.algorithm, DownpourSettings)
    return job.algorithm.rule


def test_a_job_file_becomes_structs_with_the_documented_defaults() -> None:
    job = speech("evaluation.metric=top5")
    assert job.model == ModelSpec(factory="speech.model:net", arguments={"hidden": [512, 512]})
    assert job.data.train == DataSpec(factory="speech.data:frames", arguments={"part": "train"})
    assert job.algorithm_name == "downpour"
    assert rule_of(job) == Adagrad(learning_rate=0.02)
    assert job.cluster == ClusterTable(replicas=2, shards=2)
    assert (job.cluster.threads, job.cluster.partitions, job.cluster.patience) == (1, 1, 600.0)
    assert job.cluster.shared_memory
    assert job.evaluation == EvaluationTable(metric="top5", subset=None, every=10.0)
    assert speech().evaluation.metric is None  # chosen by the loss
    assert job.stop == StopTable(epochs=1)
    assert (job.output.report_every, job.output.snapshot_every) == (2.0, 30.0)
    assert job.name == "speech-demo"
    assert (job.task.loss, job.task.metric) == ("cross_entropy", "top5")
    assert job.task.data == {"data.train": job.data.train, "data.test": job.data.test}


def test_without_an_output_directory_a_run_is_called_after_its_file() -> None:
    text = SPEECH.replace('directory = "runs/speech-demo"', "")
    job = parse_job(text, path="jobs/tiny.toml")
    assert job.output.directory == "runs/tiny"
    assert job.name == "tiny"


def test_seconds_may_be_a_number_since_the_key_names_the_unit() -> None:
    assert speech("stop.seconds=90").stop.seconds == 90.0
    assert speech("stop.seconds=10 min").stop.seconds == 600.0


def test_weights_and_arguments_that_begin_with_a_dot_are_paths_beside_the_file() -> None:
    job = speech(
        "model.initial=old.safetensors",
        'data.train.arguments={files = ["./a.npz", "../b.npz", "c"], n = 1}',
        path="/data/jobs/speech.toml",
    )
    assert job.model.initial == "/data/jobs/old.safetensors"
    expected = {"files": ["/data/jobs/a.npz", "/data/b.npz", "c"], "n": 1}
    assert job.data.train.arguments == expected


def test_import_paths_are_the_files_directory_then_the_current_one() -> None:
    here = str(Path.cwd())
    assert speech(path="/data/jobs/speech.toml").import_paths == ("/data/jobs", here)
    assert speech(path="jobs/speech.toml").import_paths == (f"{here}/jobs", here)


def test_an_override_replaces_a_value_needs_no_quotes_and_the_last_one_wins() -> None:
    job = speech(
        "cluster.replicas=3",
        "cluster.replicas=4",
        "output.directory=runs/other",
        "output.report_every=500 ms",
        "algorithm.n_push=5",
        "algorithm.rule.learning_rate=0.1",
        "model.arguments.depth=3",
        "model.arguments.day=2012-12-03",  # a date to TOML
    )
    assert job.cluster.replicas == 4
    assert (job.output.directory, job.output.report_every) == ("runs/other", 0.5)
    assert isinstance(job.algorithm, DownpourSettings)
    assert (job.algorithm.n_push, job.algorithm.rule.learning_rate) == (5, 0.1)
    assert job.model.arguments == {"hidden": [512, 512], "depth": 3, "day": "2012-12-03"}


LOCAL = SPEECH.replace('rule = { name = "adagrad", learning_rate = 0.02 }', 'preset = "local"')


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_becomes_keys_that_are_stored_with_the_run(name: str) -> None:
    job = parse_job(LOCAL.replace('"local"', f'"{name}"'), path="speech.toml")
    assert parse_job(job.to_toml(), path="job.toml").algorithm == job.algorithm
    assert job_from_json(job.to_json()) == job
    assert isinstance(job.algorithm, DownpourSettings)
    assert job.algorithm.pace.sends_delta == (job.algorithm.inner is not None)


def test_a_given_key_replaces_that_of_the_preset_and_another_name_all_of_them() -> None:
    overrides = ["exchange.every=16", "inner.lr=0.5", "inner.fused=true", "rule.weight_decay=0.1"]
    given = parse_job(
        LOCAL, path="speech.toml", overrides=[f"algorithm.{each}" for each in overrides]
    ).algorithm
    assert isinstance(given, DownpourSettings)
    usual = ExchangePolicy(send="delta", every=16, weight="mean", numbers="bfloat16")
    assert given.exchange == usual
    assert given.inner == {"name": "AdamW", "lr": 0.5, "fused": True}
    assert given.rule == SGD(learning_rate=1.0, weight_decay=0.1)
    other = parse_job(LOCAL, path="speech.toml", overrides=["algorithm.inner={name='SGD'}"])
    assert isinstance(other.algorithm, DownpourSettings)
    assert other.algorithm.inner == {"name": "SGD"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("preset=locl", "preset = \"locl\" is not known. Did you mean 'local'? Known: downpour, "),
        ("inner.lrr=3", "inner AdamW has no keyword 'lrr'. Did you mean 'lr'?"),
        ("inner.name=adamw", "name = 'adamw', which torch has not. Did you mean 'AdamW'?"),
        ("inner.learning_rate=1", "inner AdamW has no keyword 'learning_rate'. Did you mean 'lr'?"),
        ("inner.betas=[0.9]", "torch does not accept lr = 0.001, betas = [0.9]: use values of the"),
        ("inner.schedule={name='StpLR'}", "which torch has not. Did you mean 'StepLR'?"),
        ("inner.schedule={name='StepLR', step_siz=3}", "Did you mean 'step_size'?"),
        ("inner.schedule={name='StepLR', step_size='3'}", "torch does not accept step_size = '3'"),
        ("inner.name=LBFGS", "inner has name = 'LBFGS', which does not fit here. It knows ASGD, "),
        ("inner.lr=-1", "inner AdamW: Invalid learning rate: -1"),
        ("inner.schedule=3", "inner.schedule is 3; use a table, such as { name = "),
        ('inner.schedule={name="StepLR"}', "inner.schedule StepLR: missing 1 required "),
        # These two ended the job after its start: at the first local step.
        ('inner.schedule={name="StepLR", step_size=0}', "inner.schedule StepLR: integer modulo"),
        (
            'inner.schedule={name="CosineAnnealingLR", T_max="x"}',
            "inner.schedule CosineAnnealingLR: torch does not accept T_max = 'x'",
        ),
        (
            "inner={foreach=true, fused=true}",
            "inner AdamW: `fused` and `foreach` cannot be `True` together",
        ),
        ("inner=3", "[algorithm] inner = 3: wants a table: { ... }"),
        ("exchange.evry=3", "[algorithm.exchange] has no key 'evry'. Did you mean 'every'?"),
        ("exchange.round={quorm=1}", "[algorithm.exchange.round] has no key 'quorm'. Did you mean"),
        (
            "exchange.every=often",
            '[algorithm.exchange] every = "often": wants a whole number or "au',
        ),
        ("exchange.weight=sam", 'weight = "sam": wants "mean" or "samples" or "sum"'),
        (
            "n_push=5",
            'both say when to exchange: leave one of them out (every: from preset = "local")',
        ),
        ("exchange.preset=local", "'preset' belongs into [algorithm]."),
        ("groups={}", "[algorithm] has no key 'groups'. 'groups' belongs into [algorithm.rule]."),
        ('rule.groups={"b"=3}', "algorithm.rule.groups.b = 3: wants a table"),
        (
            'rule.groups={"b"={name="sgd", learning_rat=3}}',
            "[algorithm.rule.groups.b] has no key 'learning_rat'. Did you mean 'learning_rate'?",
        ),
        (
            'rule.groups={"b"={name="sgd", learning_rate="x"}}',
            '[algorithm.rule.groups.b] learning_rate = "x": wants a number',
        ),
        (
            "overwrite_local_steps=true",
            'overwrite_local_steps is given and exchange.send is "delta"',
        ),
        ("exchange.send=gradient", 'or leave inner out (inner: from preset = "local")'),
        ('rule={name="adam", learning_rate=1}', "deltas of 2 workers are applied one by one"),
    ],
)
def test_a_mistake_in_an_exchange_names_its_key(override: str, message: str) -> None:
    said = mistake(f"algorithm.{override}", text=LOCAL)
    assert message in said
    assert said.startswith((f"--set algorithm.{override}: ", "speech.toml: [algorithm] rule is"))


@pytest.mark.parametrize(
    "override",
    [
        "inner.name=adamw",  # said of the user's own key that the preset gave it
        "inner.schedule=3",  # its way out has `name = `
        "rule.n_pushes=3",  # its way out lists every key that the rule knows
    ],
)
def test_only_a_key_of_the_preset_is_said_to_come_from_it(override: str) -> None:
    assert "from preset" not in mistake(f"algorithm.{override}", text=LOCAL)


def test_a_preset_of_a_batch_method_is_not_sent_to_the_table_where_it_stands() -> None:
    text = LOCAL.replace("batch_size = ", "# ")
    said = mistake("algorithm.name=sandblaster", text=text)
    assert "[algorithm] has no key 'preset'. It knows " in said


def test_a_push_is_not_divided_by_the_weight_and_again_by_delayed_nesterov() -> None:
    # The refusal of momentum advised just this, and each push counted half.
    rule = '{name="delayed_nesterov", learning_rate=0.7, n_pushes=2}'
    said = mistake(f"algorithm.rule={rule}", text=LOCAL)
    assert """weight is 'mean' and rule is 'delayed_nesterov', which divides""" in said
    assert said.endswith("""use weight = "sum" (weight: from preset = "local")""")


def test_groups_of_a_rule_keep_their_order_where_the_job_is_stored() -> None:
    groups = '{ "*.bias" = { name = "sgd", learning_rate = 0.5 }, "1.*" = { name = "momentum", '
    groups = f"algorithm.rule.groups={groups}learning_rate=1}} }}"
    in_rounds = "algorithm.exchange.round={quorum=0.5}"
    job = parse_job(LOCAL, path="speech.toml", overrides=[groups, in_rounds])
    assert rule_of(job).label == "sgd; *.bias=sgd; 1.*=momentum"
    assert rule_of(parse_job(job.to_toml(), path="job.toml")) == rule_of(job)
    assert rule_of(job_from_json(job.to_json())).label == rule_of(job).label


def test_the_command_lists_presets_and_prints_one_as_it_would_be_written() -> None:
    listed = CliRunner().invoke(app, ["presets"])
    assert max(map(len, listed.stdout.splitlines())) <= 80
    assert all(f"\n{name} " in f"\n{listed.output}" for name in PRESETS)
    printed = CliRunner().invoke(app, ["presets", "diloco"])
    table = tomllib.loads(printed.output)["algorithm"]
    assert table == {"name": "downpour", **PRESETS["diloco"]}
    wrong = CliRunner().invoke(app, ["presets", "dloco"])
    assert wrong.exit_code == 2
    assert "Did you mean 'diloco'?" in wrong.output


def test_optimizers_of_whole_tensors_are_refused_where_replicas_are_split() -> None:
    said = mistake("algorithm.inner={name='Adafactor'}", "cluster.partitions=2", text=LOCAL)
    assert "inner.name is 'Adafactor', whose steps depend on whole tensors, and [cluster]" in said


@pytest.mark.parametrize("override", ["algorithm.n_push", "=5", "a..b=1"])
def test_an_override_that_is_none_says_how_to_write_one(override: str) -> None:
    said = mistake(override)
    assert said == f"--set {override}: write TABLE.KEY=VALUE, for example algorithm.n_push=5"


def test_a_mistake_in_a_sweep_blames_the_sweep(tmp_path: Path) -> None:
    """Regression: it named `--set`, which nobody had given."""
    (tmp_path / "speech.toml").write_text(SPEECH)
    with pytest.raises(JobError, match=r"^--sweep cluster\.replicas=0: \[cluster\] replicas = 0"):
        load_job(tmp_path / "speech.toml", swept=["cluster.replicas=0"])
    with pytest.raises(JobError, match=r"^--sweep x: write TABLE\.KEY=VALUE"):
        load_job(tmp_path / "speech.toml", swept=["x"])


def test_a_mistake_in_an_override_blames_the_override_and_not_its_neighbour() -> None:
    assert mistake("algorithm.n_pushes=5") == (
        "--set algorithm.n_pushes=5: [algorithm] has no key 'n_pushes'. Did you mean 'n_push'?"
    )
    for override in ("clutser.replicas=5", "cluster.plan=a.txt"):
        assert mistake(override).startswith(f"--set {override}: ")
    assert mistake("cluster.replicas.x=3") == (
        "--set cluster.replicas.x=3: cluster.replicas is 2, not a table"
    )
    text = SPEECH.replace("shards = 2", "plan = 'a.txt'")
    assert mistake("cluster.replicas=3", text=text).startswith("speech.toml: ")


def test_a_plan_and_a_cluster_file_are_found_beside_the_job() -> None:
    text = SPEECH.replace("shards = 2", 'plan = "p/plan.json"\nmachines = "c.toml"')
    cluster = parse_job(text, path="jobs/speech.toml").cluster
    assert cluster.plan == str(Path.cwd() / "jobs" / "p" / "plan.json")
    assert cluster.machines == str(Path.cwd() / "jobs" / "c.toml")
    assert cluster.is_split


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # unknown keys, at every depth
        ("eval={}", "has no key 'eval'. Did you mean 'evaluation'?"),
        ("clutser={}", "has no key 'clutser'. Did you mean 'cluster'?"),
        ("data.tets={}", "[data] has no key 'tets'. Did you mean 'test'?"),
        ("data.train.factry=x", "[data.train] has no key 'factry'. Did you mean 'fac"),
        ("cluster.zzz=1", "[cluster] has no key 'zzz'. It knows replicas, shards, "),
        (
            "algorithm.rule.learning_rat=1",
            "[algorithm.rule] has no key 'learning_rat'. Did you mean 'learning_rate'?",
        ),
        # everyday words of torch
        ("algorithm.rule.lr=0.1", "Did you mean 'learning_rate'?"),
        ("algorithm.lr=0.1", "'learning_rate' belongs into rule of [algorithm]"),
        ("algorithm.batch=8", "Did you mean 'batch_size'?"),
        ("algorithm.optimizer=adam", "Did you mean 'rule'?"),
        ("optimizer.name=adam", "'rule' belongs into [algorithm]"),
        ("algorithm.epochs=3", "'epochs' belongs into [stop]"),
        ("algorithm.num_epochs=3", "'epochs' belongs into [stop]"),
        ("stop.batch_size=3", "'batch_size' belongs into [algorithm]"),
        ("algorithm.momentum=0.9", 'rule = { name = "momentum"'),
        ("algorithm.rule.momentum=0.9", 'rule = { name = "momentum"'),
        ("cluster.workers=3", "Did you mean 'replicas'?"),
        ("algorithm.criterion=mse", "Did you mean 'loss'?"),
        # ill-typed values
        ("algorithm.n_push=x", '[algorithm] n_push = "x": wants a whole number'),
        ("algorithm.exchange.every=1.5", 'every = 1.5: wants a whole number or "auto"'),
        ("algorithm.n_push=1.5", "[algorithm] n_push = 1.5: wants a whole number"),
        ("cluster.shared_memory=1", "shared_memory = 1: wants true or false"),
        ("model.factory=3", "[model] factory = 3: wants text in quotes"),
        ("model.arguments=3", "[model] arguments = 3: wants a table"),
        ("data=3", "data = 3: wants a table; begin it with [data]"),
        ("name=3", "name = 3: wants text in quotes"),
        # ranges
        ("cluster.replicas=0", "replicas = 0: wants a whole number, at least 1"),
        ("cluster.shard_copies=3", "shard_copies = 3: wants a whole number, at most 2"),
        ("stop.accuracy=60", "[stop] accuracy = 60: wants a number, at most 1"),
        ("stop.epochs=0", "[stop] epochs = 0: wants a number, above 0"),
        ("algorithm.batch_size=0", "[algorithm] batch_size is 0; use "),
        (f"cluster.replicas={10**22}", "0000: wants a whole number, at most 16384"),
        ("cluster.shards=10000000", "wants a whole number, at most 4096"),
        ("cluster.threads=1000000", "wants a whole number, at most 1024"),
        (f"model.seed={10**22}", "seed = 10000000000000000000000: wants a whole number"),
        (f"algorithm.batch_size={10**26}", "batch_size = 1" + 26 * "0" + ": wants"),
        (f"algorithm.n_push={10**17}", "n_push = 100000000000000000: wants at most 90071992547"),
        (f"stop.samples={10**17}", "samples = 100000000000000000: wants at most 9007199254740992"),
        ('output.snapshot_every="1e300 h"', 'wants at most "36500 d"'),
        ('cluster.patience="40000 d"', 'wants at most "36500 d"'),
        (r'output.directory="a\u0000b"', "wants no control characters"),
        (r'cluster.checkpoints="a\u001b[2J"', "wants no control characters"),
        (r'model.factory="a\u0000:b"', "wants no control characters"),
        (f"output.directory='{5000 * 'x'}'", "has 5000 characters, wants at most 4096"),
        ("stop.epochs=inf", "wants a number, at most"),
        ("stop.epochs=1e300", "wants a number, at most"),
        ("stop.loss=nan", "wants a finite number"),
        ("stop.loss=inf", "wants a finite number"),
        # quantities
        ("output.report_every=2", 'report_every = 2 has no unit: write "2 s"'),
        ("output.snapshot_every=2 sec", "has the unknown unit 'sec'"),
        ("cluster.patience=1 s", "[cluster] patience = 1 s: wants at least 2 s"),
        ("cluster.patience=600", 'patience = 600 has no unit: write "600 s"'),
        ("evaluation.every=0 s", '[evaluation] every = "0 s": wants a quantity, above 0'),
        # names out of a set
        ("algorithm.rule.name=adagrd", "\"adagrd\": unknown. Did you mean 'adagrad'?"),
        ("algorithm.rule={learning_rate=1}", "lacks the key 'name': give it \"sgd\" or"),
        ("algorithm.rule.schedule={name='step'}", "lacks the key 'n_pushes'"),
        ("algorithm.name=downpur", "Did you mean 'downpour'? Installed: "),
        # what cannot be sent to a role process
        ("model.arguments.width=inf", "[model.arguments] width = inf: wants"),
        ("model.arguments.width=[1, nan]", "[model.arguments] width = nan: wants"),
        ("model.arguments.width=99999999999999999999", "(64 bits)"),
        # machines
        ("cluster.partitions=0", "[cluster] partitions"),
        ("cluster.checkpoints=", 'checkpoints = "": wants a folder or a URL'),
        ("cluster.plan=plan.toml", "plan = 'plan.toml': wants the path of a plan.json"),
        ("cluster.device=tpu", "[cluster] device = 'tpu': wants 'cpu' or 'cuda'"),
        # others
        ("output.directory=", '[output] directory = "": name one, for example'),
        ("model.initial=zeros", "[model] initial"),
    ],
)
def test_a_mistake_names_table_key_value_and_mend(override: str, message: str) -> None:
    said = mistake(override)
    assert message in said
    assert "`" not in said.replace("`distbelief", "")  # msgspec's words, not ours


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ('loss = "cross_entropy"', "[algorithm] lacks the key 'loss': give it text"),
        (
            'rule = { name = "adagrad", learning_rate = 0.02 }',
            '[algorithm] has neither rule nor preset: give rule = { name = "adagrad", learning',
        ),
        ("batch_size = 256", "[algorithm] lacks the key 'batch_size': give it a whole"),
        ('factory = "speech.model:net"', "[model] lacks the key 'factory'"),
        ('name = "downpour"', "[algorithm] lacks the key 'name'"),
        ("epochs = 1", "[stop] is empty, so the job would never end: add epochs = 1"),
        ("[stop]\nepochs = 1", "there is no table [stop]: add one"),
        (
            SPEECH[SPEECH.index("[data.train]") : SPEECH.index("[data.test]")],
            "there is no table [data.train]: add one",
        ),
    ],
)
def test_what_is_missing_is_named(gone: str, message: str) -> None:
    assert gone in SPEECH
    assert mistake(text=SPEECH.replace(gone, "")).startswith(f"speech.toml: {message}")


def test_an_algorithm_that_is_not_installed_lists_those_that_are() -> None:
    installed = ", ".join(sorted(point.name for point in entry_points(group=algorithms.GROUP)))
    assert mistake("algorithm.name=downhill").endswith(
        f'[algorithm] name = "downhill" is not installed. Installed: {installed}'
    )


def test_accuracy_as_a_stop_rule_needs_held_out_data() -> None:
    text = SPEECH.replace('[data.test]\nfactory = "speech.data:frames"\n', "")
    assert "needs held-out data: add a table [data.test]" in mistake("stop.accuracy=0.4", text=text)


def test_bad_toml_names_the_line_and_shows_it() -> None:
    assert "line 1" in mistake(text='name = "speech')
    said = mistake(text=SPEECH.replace("shards = 2", "shards == 2"))
    assert said.startswith("speech.toml: not valid TOML: ")
    assert re.search(r"line \d+", said)
    assert "| shards == 2" in said


def test_what_is_no_job_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "speech.toml").write_text(SPEECH)
    for name, said in [
        ("spech.toml", r"no such file. Did you mean '.*speech.to"),
        ("none/zzz.toml", r"no such file\.$"),
        ("", r"is a directory: .*--resume"),
    ]:
        with pytest.raises(JobFileError, match=said):
            load_job(tmp_path / name)
    for content, said in [
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (bytes(range(256)), "is not UTF-8 text"),
        (b"#" * (1 << 20) + b"#", "more than 1048576 bytes"),
        (b"", "there is no table"),
        (b"a = " + b"[" * 5000, "brackets too deep"),
        (b"\0\0", "not valid TOML"),
        (b"[model", "not valid TOML"),
    ]:
        (tmp_path / "odd.toml").write_bytes(content)
        with pytest.raises(JobFileError, match=said):
            load_job(tmp_path / "odd.toml")
    (tmp_path / "odd.toml").write_bytes(b"\xef\xbb\xbf" + SPEECH.encode())  # as some editors do
    assert load_job(tmp_path / "odd.toml").batch_size == 256


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    with pytest.raises(JobError):
        parse_job(text, path="speech.toml")


names = st.text(min_size=1, max_size=8)
plain = st.recursive(
    st.text(max_size=8)
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.untraced
@given(
    arguments=st.dictionaries(names, plain, max_size=4),
    n=st.integers(1, 4096),
    seconds=st.floats(1e-6, 1e9),
    metric=st.sampled_from([None, "accuracy", "top5"]),
)
def test_a_job_reads_back_equal_from_toml_and_from_json(
    arguments: dict[str, object], n: int, seconds: float, metric: str | None
) -> None:
    table = toml.inline(arguments)
    overrides = [
        f"model.arguments={table}",
        f"cluster.replicas={n}",
        f"evaluation.every={seconds!r} s",
        f"stop.seconds={seconds!r}",
    ]
    if metric is not None:
        overrides.append(f"evaluation.metric={metric}")
    job = speech(*overrides)
    assert job.model.arguments == arguments
    assert job.evaluation.every == seconds
    assert parse_job(job.to_toml(), path="elsewhere/job.toml") == job
    assert job_from_json(job.to_json()) == job


def test_a_job_as_run_keeps_where_it_came_from(tmp_path: Path) -> None:
    job = speech("model.initial=old.safetensors", path="/data/jobs/speech.toml")
    (tmp_path / "job.toml").write_text(job.to_toml())
    assert load_job(tmp_path / "job.toml") == job
    assert (job.source, job.import_paths[0]) == ("/data/jobs/speech.toml", "/data/jobs")


def test_json_that_is_no_job_is_refused() -> None:
    for text in (b"", b"[]", b"{}", b'{"model": 1}', b'{"\xd8": 1}'):
        with pytest.raises(JobFileError):
            job_from_json(text)


def test_quantities_are_written_with_their_units() -> None:
    assert 'every = "10 s"' in speech().to_toml()
    assert 'seconds = "10 min"' in speech("stop.seconds=600").to_toml()


def test_an_algorithm_that_cannot_be_imported_says_which() -> None:
    point = entry_points(group=algorithms.GROUP)["downpour"]
    broken = type(point)(name="broken", value="no.such.module:X", group=point.group)
    with pytest.raises(JobFileError, match=r"no\.such\.module:X, installed as algorithm"):
        algorithms.load(broken)


def test_a_mistake_in_the_jobs_own_tables_is_told_without_torch(tmp_path: Path) -> None:
    (tmp_path / "speech.toml").write_text(SPEECH.replace("epochs", "epoch"))
    code = (
        "import sys\n"
        "from distbelief.config.load import load_job\n"
        "try:\n    load_job('speech.toml')\n"
        "except Exception as error:\n    print(error)\n"
        "print('torch' in sys.modules)\n"
    )
    done = ended(code, cwd=tmp_path)
    said = "speech.toml: [stop] has no key 'epoch'. Did you mean 'epochs'?"
    assert done.stdout.splitlines() == [said, "False"]


def test_a_rule_of_torch_has_the_name_and_the_keywords_of_its_class() -> None:
    assert "Did you mean 'AdamW'?" in mistake("algorithm.rule.name=adamw")
    rule = rule_of(speech("algorithm.rule={name='AdamW', lr=0.02, betas=[0.8, 0.99]}"))
    made = {"name": "AdamW", "lr": 0.02, "betas": (0.8, 0.99)}
    assert rule == msgspec.convert(made, UpdateRule)
    assert rule.learning_rate == 0.02


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("{name='Adafactor'}", "depend on whole tensors, of which a shard holds parts: use anoth"),
        ("{name='LBFGS'}", 'It is [algorithm] name = "sandblaster", method = "l-bfgs"'),
        ("{name='NAdam', learning_rate=1}", "has no key 'learning_rate'. Did you mean 'lr'?"),
        ("{name='NAdam', lr='x'}", '[algorithm.rule] lr = "x": wants a number'),
        ("{name='NAdam', betas=[1, 1]}", "rule 'NAdam': Invalid beta parameter at index 0: 1.0"),
        ("{name='NAdam', eps=0}", "rule 'NAdam': eps is 0.0; use a finite number above 0"),
        ("{name='NAdam', lr=-1}", "rule 'NAdam': lr is -1.0; use a finite number"),
        ("{name='NAdam', lr=0}", "rule 'NAdam': lr is 0; use a number above 0"),
        ("{name='NAdam', learning_rat=1}", "has no key 'learning_rat'. Did you mean 'lr'?"),
        ("{name='AdaWm'}", "Did you mean 'AdamW'?"),
        ("{name='NAdam', betas=[0.9]}", "betas = [0.9]: wants a list: [...], of length 2"),
        ("{name='NAdam', betas=[0.9, 'x']}", '[algorithm.rule] betas[1] = "x": wants a number'),
        ("{name='AdamW', fused=true, foreach=true}", "`fused` and `foreach` cannot be `True`"),
        ("{name='AdamW', capturable=true}", "has no key 'capturable'"),
    ],
)
def test_a_wrong_rule_of_torch_is_refused_with_the_way_out(rule: str, said: str) -> None:
    assert said in mistake(f"algorithm.rule={rule}")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.num_workers=4", "'num_workers' belongs into [data.train]"),
        ("data.train.dataloader_num_workers=4", "Did you mean 'num_workers'?"),
        ("data.train.pin_memory=true", "by as many processes as num_workers of [data.train] says"),
        ("algorithm.shuffle=true", "Each epoch has an order of its own"),
        ("data.train.collate_fn='a:b'", "Did you mean 'collate'?"),
        ("data.train.drop_last=true", "return a torch DataLoader that has it"),
        ("algorithm.accumulate_grad_batches=4", "Did you mean 'accumulate'?"),
        ("stop.max_steps=100", "It is samples of [stop]: steps times batch_size"),
        ("algorithm.gradient_clip_algorithm='value'", "clip_value of the rule"),
        ("algorithm.precision='bf16-mixed'", "under torch.autocast"),
        ("algorithm.gradient_clip_val=1.0", "Did you mean 'clip_norm'?"),
        ("algorithm.scheduler='cosine'", "It is the schedule of the rule"),
        ("algorithm.warmup_steps=10", "n_warm_up"),
        ("algorithm.rule.nesterov=true", 'It is an option of rule = { name = "momentum"'),
        ("cluster.devices=2", "Did you mean 'replicas'?"),
        ("cluster.accelerator='gpu'", "Did you mean 'device'?"),
        ("cluster.strategy='ddp'", "It is [algorithm] preset"),
        ("cluster.num_nodes=2", "--hosts N"),
        ("cluster.backend='nccl'", "Processes find each other by themselves"),
        ("data.val.factory='a:b'", "Held-out data are the table [data.test]"),
        ("evaluation.val_check_interval=100", 'every = "10 s"'),
        ("output.log_every_n_steps=10", 'report_every = "2 s"'),
        ("output.save_steps=10", 'snapshot_every = "30 s"'),
        ("output.default_root_dir='x'", "Did you mean 'directory'?"),
        ("stop.num_train_epochs=3", "Did you mean 'epochs'?"),
        ("resume='runs/x'", "distbelief train --resume RUN_DIR"),
    ],
)
def test_keys_of_other_libraries_are_answered_with_what_is_here(override: str, said: str) -> None:
    """Regression: num_workers, of a DataLoader, was said to be [cluster] replicas."""
    text = mistake(override)
    assert "has no key '" in text
    assert said in text


def test_averages_that_nobody_keeps_cannot_be_evaluated() -> None:
    text = mistake("evaluation.averaged=true")
    assert "no average is kept: give the rule in [algorithm] ema" in text
    ema = "algorithm.rule={name='sgd', learning_rate=0.1, ema=0.9}"
    assert speech("evaluation.averaged=true", ema).evaluation.averaged


@pytest.mark.parametrize(
    ("text", "n_samples", "written"),
    [
        ("1 epoch", 1000, "1 epoch"),
        ("0.5 epochs", 500, "0.5 epochs"),
        ("500 steps", 128_000, "500 steps"),
        ("20000 samples", 20_000, "20000 samples"),
    ],
)
def test_a_period_may_be_counted(text: str, n_samples: int, written: str) -> None:
    job = speech(f"evaluation.every={text}")
    every = job.evaluation.every
    assert isinstance(every, Passes)
    assert every.n_samples(n_train=1000, batch_size=256) == n_samples
    assert f'every = "{written}"' in job.to_toml()
    assert parse_job(job.to_toml(), path="job.toml").evaluation == job.evaluation
    assert job_from_json(job.to_json()) == job


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("evaluation.every=1 epcoh", "unknown unit 'epcoh'"),
        ("evaluation.every=0 epochs", "wants a"),
        ("evaluation.metric=[]", "wants 1 to 32 different names"),
        ('evaluation.metric=["top5", "top5"]', "wants 1 to 32 different names"),
        ("stop.early_stopping=3", r"It is patience of \[stop\]"),
        ("output.save_top_k=1", r"It is keep of \[output\]"),
        ("data.train.overfit_batches=2", "in samples: limit = 64"),
        ("stop.max_time=5", 'seconds = "10 min"'),
        ("stop.min_delta=0.1", "add patience = 5, or leave min_delta out"),
        ('output.keep="first"', 'wants "best" or "last"'),
    ],
)
def test_what_loop_control_cannot_mean_is_refused(setting: str, error: str) -> None:
    with pytest.raises(JobFileError, match=error):
        speech(setting)


@pytest.mark.parametrize("setting", ["stop.patience=3", 'output.keep="best"'])
def test_what_needs_evaluations_needs_held_out_data(setting: str) -> None:
    with pytest.raises(JobFileError, match=r"needs held-out data: add a table \[data.test\]"):
        parse_job(small("a:b", "a:c"), path="job.toml", overrides=[setting])


def test_split_replicas_keep_no_best_values() -> None:
    with pytest.raises(JobFileError, match=r"leave keep out, and end the job .* patience"):
        speech('output.keep="best"', "cluster.partitions=2")


def test_the_file_of_a_run_that_cannot_be_read_names_the_version_that_wrote_it(
    tmp_path: Path,
) -> None:
    """--resume said that it has no such key, as if the user had written it."""
    (tmp_path / "snapshots").mkdir()
    path = tmp_path / "job.toml"
    path.write_text(SPEECH + "from_the_future = 3\n")
    with pytest.raises(JobFileError, match=r"no key 'from_the_future'.* use the version that wr"):
        load_job(path, overrides=["stop.epochs=2"])
    path.write_text(SPEECH)
    with pytest.raises(JobFileError, match="epoch_s") as caught:
        load_job(path, overrides=["stop.epoch_s=2"])
    assert "version" not in str(caught.value)
