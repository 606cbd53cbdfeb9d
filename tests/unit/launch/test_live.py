import io

from rich.console import Console

from trainer.launch.live import LiveView, Pace, Paces
from trainer.telemetry.pod import PodView, RankView


def rank(at, *, rank=0, pid=1, up=True, steps=0, waited=0.0, step=None, state="data_wait"):
    return RankView(rank=rank, local_rank=rank, pid=pid, up=up, state=state, step=steps if step is None else step,
                    epoch=2, at=at, steps=steps, samples=32 * steps, step_seconds=0.1 * steps,
                    times={"data_wait": waited, "compute": at - waited})


def test_pace_is_taken_over_the_last_seconds():
    paces = Paces()
    assert paces.update([rank(100)]) == {}
    assert paces.update([rank(101, steps=10, waited=0.25)]) == {0: Pace(320.0, 0.1, 0.25)}
    for second in range(2, 31):
        pace = paces.update([rank(100 + second, steps=10 + second, waited=0.25)])[0]
    assert round(pace.samples_per_second) == 32  # the quick first second is forgotten
    assert pace.data_wait == 0


def test_a_new_process_begins_a_new_pace():
    paces = Paces()
    paces.update([rank(100, steps=50)])
    assert paces.update([rank(101, pid=2, steps=1)]) == {}
    assert paces.update([rank(102, pid=2, steps=11)])[0].samples_per_second == 320


def test_a_rank_that_is_gone_has_no_pace():
    paces = Paces()
    paces.update([rank(100)])
    assert paces.update([rank(101, steps=10, up=False)]) == {}


def draw(view, width=80):
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    live = LiveView("digits", lambda: view, lambda: "training", console)
    console.print(live.render())
    return console.file.getvalue()


def test_the_view_shows_what_the_ranks_do():
    text = draw(PodView(
        ranks=(rank(5, steps=120), rank(5, rank=1, steps=119, up=False)), world_size=2, restarts=2, lost_steps=5,
        values={"loss": 0.123456, "learning_rate": 0.001, "grad_norm": 1.5, "checkpoint_last_step": 100},
        info={"total_steps": 480}))
    assert all(len(line) <= 80 for line in text.splitlines())
    for words in ("digits  training", "2 restarts, 5 steps repeated", "step 120/480", "25%", "epoch 2", "loss 0.1235",
                  "lr 0.001", "checkpoint step 100", "data wait", "gone"):
        assert words in text


def test_a_rank_that_has_ended_well_is_finished_and_not_gone():
    view = PodView(ranks=(rank(5, up=False, state="shutdown"),), world_size=1, restarts=0, lost_steps=0, values={},
                   info={})
    text = draw(view)
    assert "finished" in text
    assert "gone" not in text


def test_before_the_first_word_of_a_rank_there_is_one_line():
    view = PodView(ranks=(), world_size=0, restarts=0, lost_steps=0, values={}, info={})
    assert len(draw(view).splitlines()) == 1


def test_a_run_of_unknown_length_has_no_bar():
    view = PodView(ranks=(rank(5, steps=3),), world_size=1, restarts=0, lost_steps=0, values={}, info={})
    text = draw(view)
    assert "step 3 " in text
    assert "checkpoint none yet" in text
    assert "━" not in text


def test_output_of_a_child_is_printed_above_the_view():
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    view = PodView(ranks=(), world_size=0, restarts=0, lost_steps=0, values={}, info={})
    with LiveView("digits", lambda: view, lambda: "training", console) as live:
        live.follow(io.BytesIO(b"first \x1b[1mbold\x1b[0m\nsecond [not markup]\n\xff")).join()
    text = console.file.getvalue()
    assert "first bold\n" in text
    assert "second [not markup]\n" in text
