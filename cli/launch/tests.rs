#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::sync::MutexGuard;

use clap::Parser;

use super::*;

/// Long enough that a test which waits for it has failed.
const FOREVER: Duration = Duration::from_secs(60);

/// A POSIX shell's script as what the ranks of one node do.
fn job(nproc: usize, script: &str) -> Job {
    Job {
        program: "/bin/sh".into(),
        arguments: vec!["-c".into(), script.into()],
        place: Place { nproc, nnodes: 1, node: 0, host: "127.0.0.1".into(), port: 29500 },
        cores_to_share: None,
        terminal: false,
        grace: FOREVER,
        patience: FOREVER,
    }
}

/// What came out, in the order in which it did: the ranks' lines, and the launcher's own after `note: ` or `error: `.
#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl Written {
    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap()
    }

    fn text(&self) -> String {
        String::from_utf8(self.bytes().clone()).unwrap()
    }
}

impl Write for Written {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.bytes().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Runs a job while `observe` gets to see what was written so far, and makes the wish to stop by giving true. `$0` is a path at
/// which there is no file yet, the same for the ranks and for `observe`. Gives the exit code and all that was written.
fn run_observed(job: Job, observe: impl Fn(&str, &Path) -> bool + Sync) -> (u8, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    let job = Job { arguments: [job.arguments, vec![file.clone().into()]].concat(), ..job };
    let (written, stop, over) = (Written::default(), AtomicBool::new(false), AtomicBool::new(false));
    let sink: Sink = Arc::new(Mutex::new(written.clone()));
    let say = |line: Line| {
        let (kind, text) = match line {
            Line::Note(text) => ("note", text),
            Line::Error(text) => ("error", text),
        };
        writeln!(written.clone(), "{kind}: {text}").unwrap();
    };
    let code = thread::scope(|scope| {
        scope.spawn(|| {
            let begun = Instant::now();
            while begun.elapsed() < FOREVER && !over.load(Ordering::Relaxed) && !observe(&written.text(), &file) {
                thread::sleep(Duration::from_millis(10));
            }
            stop.store(true, Ordering::Relaxed);
        });
        let code = supervise(&job, &sink, &say, &stop);
        over.store(true, Ordering::Relaxed);
        code.unwrap()
    });
    (code, written.text())
}

/// Waits in a script until there is a file at `$0`, but not for ever, so that what is broken fails and does not hang.
const WAIT: &str = "n=0; while [ ! -e $0 ] && [ $n -lt 3000 ]; do sleep 0.02; n=$((n + 1)); done";

fn run(job: Job) -> (u8, String) {
    run_observed(job, |_, _| false)
}

#[derive(Parser)]
struct CommandLine {
    #[command(flatten)]
    args: LaunchArgs,
}

fn parse(line: &str) -> Result<LaunchArgs, clap::Error> {
    CommandLine::try_parse_from(std::iter::once("launch").chain(line.split_whitespace())).map(|line| line.args)
}

/// What the ranks of a command line are, on a node with so many devices.
fn place(line: &str, devices: usize) -> Place {
    Place::new(&parse(line).unwrap(), devices).unwrap()
}

#[test]
fn what_is_missing_or_wrong_is_named() {
    let cases: [(&str, &[&str]); 9] = [
        ("--nproc 2", &["drafthorse launch --nproc 2 -- run recipe.toml"]),
        ("-- launch -- run r", &["`launch` cannot launch itself"]),
        ("--nnodes 2 -- run r", &["--nnodes 2", "--node-rank", "--rendezvous"]),
        ("--nnodes 2 --node-rank 0 -- run r", &["--rendezvous"]),
        ("--nnodes 2 --rendezvous a:1 -- run r", &["--node-rank"]),
        ("--nnodes 2 --node-rank 2 --rendezvous a:1 -- run r", &["--node-rank 2", "--nnodes 2", "from 0"]),
        ("--node-rank 1 -- run r", &["--node-rank 1", "--nnodes 1"]),
        ("--rendezvous node0 -- run r", &["node0", "HOST:PORT"]),
        ("--rendezvous fe80::1 -- run r", &["fe80::1", "HOST:PORT"]),
    ];
    for (line, expected) in cases {
        let error = Place::new(&parse(line).unwrap(), 0).unwrap_err();
        assert!(error.is::<BadLaunch>(), "{line}: {error}");
        for expected in expected {
            assert!(error.to_string().contains(expected), "{line}: {error}");
        }
    }
    let only_one_missing = Place::new(&parse("--nnodes 2 --node-rank 0 -- run r").unwrap(), 0).unwrap_err();
    assert!(!only_one_missing.to_string().contains("--node-rank"), "{only_one_missing}");
    for (line, expected) in [
        ("--nproc 0 -- run r", "--nproc"),
        ("--nproc 100000 -- run r", "--nproc"),
        ("--nproc two -- run r", "--nproc"),
        ("--nnodes 0 -- run r", "--nnodes"),
        ("--nproc 2 run r", "'run'"),
    ] {
        let error = parse(line).err().unwrap();
        assert!(error.to_string().contains(expected) && error.exit_code() == 2, "{line}: {error}");
    }
}

#[test]
fn ranks_are_as_many_as_devices_unless_said() {
    assert_eq!(place("-- run r", 0).world(), 1);
    assert_eq!(place("-- run r", 4).world(), 4);
    assert_eq!(place("--nproc 3 -- run r", 4).world(), 3);
    assert_eq!(place("--nproc 3 --nnodes 2 --node-rank 1 --rendezvous a:1 -- run r", 4).world(), 6);
}

#[test]
fn the_ranks_meet_at_the_rendezvous_or_at_a_free_port() {
    let several = place("--nproc 2 --nnodes 2 --node-rank 1 --rendezvous [fe80::1]:29500 -- run r", 0);
    assert_eq!((several.host.as_str(), several.port, several.rank(1)), ("fe80::1", 29500, 3));
    let one = place("-- run r", 0);
    assert_eq!(one.host, "127.0.0.1");
    TcpListener::bind((Ipv4Addr::UNSPECIFIED, one.port)).unwrap();
}

#[test]
fn every_rank_gets_the_variables_of_torchrun() {
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $MASTER_PORT $OMP_NUM_THREADS";
    let place = Place { nproc: 2, nnodes: 3, node: 1, host: "node0".into(), port: 29500 };
    let job = |cores| Job { place: place.clone(), cores_to_share: Some(cores), ..job(2, script) };
    let (code, written) = run(job(6));
    let mut lines: Vec<&str> = written.lines().collect();
    lines.sort_unstable();
    assert_eq!((code, lines), (0, vec!["[rank 2] 2 0 6 2 1 node0 29500 3", "[rank 3] 3 1 6 2 1 node0 29500 3"]));
    let of = |job: &Job, variable: &str| {
        let command = job.command(0);
        command.get_envs().find(|(name, _)| *name == variable).map(|(_, value)| value.map(ToOwned::to_owned))
    };
    // Fewer cores than ranks still make a thread each.
    assert_eq!(of(&job(1), "OMP_NUM_THREADS"), Some(Some("1".into())));
    assert_eq!(of(&Job { cores_to_share: None, ..job(1) }, "OMP_NUM_THREADS"), None, "the user's own must stay");
    assert_eq!(of(&job(1), AGENT_STORE), Some(None), "an outer torchrun's store must not be looked for");
}

#[test]
fn the_exit_code_tells_done_interrupted_bad_and_failed_apart() {
    for (codes, expected, error) in [
        ("0 0", 0, None),
        ("0 3", 3, None),
        ("3 3", 3, None),
        ("2 2", 2, Some("error: rank ")),
        ("0 2", 2, Some("error: rank 1 exited with code 2")),
        ("1 0", 1, Some("error: rank 0 exited with code 1")),
        ("3 1", 1, Some("error: rank 1 exited with code 1")),
        ("101 101", 1, Some("exited with code 101")),
        ("5 1", 1, Some("error: rank 1 exited with code 1")),
        ("2 5", 2, Some("error: rank 0 exited with code 2")),
        ("5 5", 1, Some(" ended because of another rank; the others ended after it\n")),
        ("0 5", 1, Some("error: rank 1 ended because of another rank")),
        ("3 5", 1, Some("error: rank 1 ended because of another rank")),
    ] {
        let (code, written) = run(job(2, &format!("set -- {codes}; shift $RANK; exit $1")));
        assert_eq!(code, expected, "{codes}: {written}");
        match error {
            Some(error) => assert!(written.contains(error), "{codes}: {written}"),
            None => assert_eq!(written, "", "{codes}"),
        }
    }
}

#[test]
fn a_rank_that_fails_alone_is_not_said_to_have_ended_others() {
    assert_eq!(run(job(1, "exit 1")), (1, "error: rank 0 exited with code 1\n".into()));
}

#[test]
fn the_first_to_fail_is_named_after_its_last_words() {
    // The words come out after the end has been seen. The others end only once the launcher has said why: they get time for it.
    let script = format!("if [ $RANK = 1 ]; then (sleep 0.1; echo words) & kill -9 $$; else {WAIT}; exit 1; fi");
    let (code, written) = run_observed(job(3, &script), |written, file| {
        if written.contains("to end") {
            fs::write(file, "").unwrap();
        }
        false
    });
    let killed = "rank 1 was killed by signal 9 (SIGKILL)";
    let expected =
        format!("[rank 1] words\nnote: {killed}; the others have 60 s to end\nerror: {killed}; the others ended after it\n");
    assert_eq!((code, written), (1, expected));
}

#[test]
fn a_kill_is_the_cause_though_it_was_seen_second() {
    for (signal, cause) in [("KILL", "rank 1 was killed by signal 9 (SIGKILL)"), ("ABRT", "rank 0 exited with code 1")] {
        let script = format!("[ $RANK = 0 ] && exit 1; {WAIT}; kill -{signal} $$");
        let (code, written) = run_observed(job(2, &script), |written, file| {
            if written.contains("note: rank 0 exited with code 1") {
                fs::write(file, "").unwrap();
            }
            false
        });
        assert_eq!(code, 1, "{written}");
        assert!(written.ends_with(&format!("error: {cause}; the others ended after it\n")), "{written}");
    }
}

#[test]
fn a_rank_that_ended_because_of_another_is_never_the_cause() {
    let another = "rank 1 ended because of another rank";
    for (end, cause, expected) in [
        ("exit 1", "rank 0 exited with code 1", 1),
        ("exit 2", "rank 0 exited with code 2", 2),
        ("kill -ABRT $$", "rank 0 was killed by signal 6 (SIGABRT)", 1),
        ("kill -KILL $$", "rank 0 was killed by signal 9 (SIGKILL)", 1),
    ] {
        // Rank 0 lives until the other has heard from it why it fails.
        let script = format!("[ $RANK = 1 ] && exit {BECAUSE_OF_ANOTHER}; {WAIT}; {end}");
        let (code, written) = run_observed(job(2, &script), |written, file| {
            if written.contains(&format!("note: {another}; the others have 60 s to end\n")) {
                fs::write(file, "").unwrap();
            }
            false
        });
        assert_eq!(code, expected, "{written}");
        assert!(written.ends_with(&format!("error: {cause}; the others ended after it\n")), "{written}");
    }
}

#[test]
fn the_exit_code_is_that_of_the_cause() {
    for (first, second, expected) in [("2", "1", 2), ("1", "2", 1), ("2", "5", 2)] {
        let script = format!("[ $RANK = 0 ] && exit {first}; {WAIT}; exit {second}");
        let (code, written) = run_observed(job(2, &script), |written, file| {
            if written.contains("note: rank 0") {
                fs::write(file, "").unwrap();
            }
            false
        });
        assert_eq!(code, expected, "{written}");
        assert!(written.ends_with(&format!("error: rank 0 exited with code {first}; the others ended after it\n")), "{written}");
    }
}

#[test]
fn a_cause_on_another_node_is_looked_for_there() {
    let on_one_of_two = |script: &str, patience| {
        let place = Place { nnodes: 2, node: 1, ..job(2, "").place };
        run(Job { place, grace: Duration::from_millis(300), patience, ..job(2, script) })
    };
    let (code, written) = on_one_of_two("exit 5", FOREVER);
    assert_eq!(code, 1, "{written}");
    let last = written.lines().last().unwrap();
    assert!(last.starts_with("error: rank ") && last.contains(" ended because of a rank on another node"), "{written}");
    // A rank of this node that does not even end when asked may be what the others miss.
    let (code, written) = on_one_of_two("[ $RANK = 2 ] && exit 5; trap '' TERM; sleep 60 & wait; wait", Duration::ZERO);
    assert_eq!(code, 1, "{written}");
    assert!(written.ends_with("error: rank 2 ended because of another rank; the others ended after it\n"), "{written}");
}

#[test]
fn lines_stay_whole_and_carry_their_rank() {
    // `printf` writes at once: each line comes in two pieces, those of the other ranks between them.
    let script =
        "i=0; while [ $i -lt 200 ]; do printf abc; printf 'abc\\n' >&2; printf 'def\\n'; i=$((i + 1)); done; printf end >&2";
    let (code, written) = run(Job { place: Place { node: 1, nnodes: 2, ..job(3, "").place }, ..job(3, script) });
    assert_eq!(code, 0);
    for rank in 3..6 {
        for (text, times) in [("abcdef", 200), ("abc", 200), ("end", 1)] {
            let line = format!("[rank {rank}] {text}");
            assert_eq!(written.lines().filter(|other| **other == line).count(), times, "{line}");
        }
    }
    assert_eq!(written.lines().count(), 3 * 401);
    assert!(written.ends_with('\n'));
}

#[test]
fn what_comes_out_after_a_ranks_end_is_not_lost() {
    let (code, written) = run(job(2, "(sleep 0.1; echo late >&2) &"));
    assert_eq!((code, written.matches("late").count()), (0, 2), "{written}");
}

#[test]
fn rank_0_writes_itself_unless_its_lines_could_mix_with_others() {
    let written = |nproc, node, terminal| {
        let place = Place { nnodes: 2, node, ..job(nproc, "").place };
        let (_, written) = run(Job { terminal, place, ..job(nproc, "echo from $RANK >&2") });
        let mut lines: Vec<String> = written.lines().map(String::from).collect();
        lines.sort_unstable();
        lines
    };
    let nothing: [&str; 0] = [];
    assert_eq!(written(1, 0, false), nothing);
    assert_eq!(written(1, 0, true), nothing);
    assert_eq!(written(2, 0, false), ["[rank 1] from 1", "from 0"]);
    // Before the line, what rank 0 has drawn on the terminal is cleared.
    assert_eq!(written(2, 0, true), ["\r\x1b[2K[rank 1] from 1"]);
    assert_eq!(written(1, 1, false), ["[rank 1] from 1"]);
}

#[test]
fn a_stream_without_line_ends_is_cut() {
    let (code, written) = run(job(2, "[ $RANK = 0 ] || head -c 100000 /dev/zero | tr '\\0' x"));
    assert_eq!(code, 0);
    assert_eq!(written.lines().map(str::len).collect::<Vec<_>>(), [9 + 65536, 9 + 100_000 - 65536]);
}

#[test]
fn the_wish_to_stop_reaches_every_rank_once_and_ends_with_3() {
    // Half a second is several looks at the wish: none may send the signal again, nor end the patience with a rank that saves.
    let script = format!(
        "trap 'echo asked >&2; : > $0.$RANK' TERM; echo ready >&2; {}; sleep 0.5; exit 3",
        WAIT.replace("$0", "$0.$RANK")
    );
    let (grace, patience) = (Duration::ZERO, Duration::ZERO);
    let both_ready = |written: &str, _: &Path| written.matches("ready").count() == 2;
    let (code, written) = run_observed(Job { grace, patience, ..job(2, &script) }, both_ready);
    let mut lines: Vec<&str> = written.lines().collect();
    lines.sort_unstable();
    assert_eq!((code, lines), (3, vec!["[rank 1] asked", "[rank 1] ready", "asked", "ready"]));
}

#[test]
fn a_rank_that_was_stopped_before_it_listened_was_interrupted() {
    let both_ready = |written: &str, _: &Path| written.matches("ready").count() == 2;
    let (code, written) = run_observed(job(2, "echo ready >&2; exec sleep 60"), both_ready);
    assert_eq!((code, written.contains("signal")), (3, false), "{written}");
}

#[test]
fn ranks_that_do_not_notice_a_failure_are_asked_to_end_after_the_grace() {
    let script = format!(
        "[ $RANK = 1 ] && {{ {WAIT}; exit 1; }}; trap 'echo asked >&2; exit 3' TERM; : > $0; {}",
        WAIT.replace("$0", "$0.none")
    );
    let (begun, grace) = (Instant::now(), Duration::from_millis(300));
    let (code, written) = run(Job { grace, ..job(2, &script) });
    assert!(begun.elapsed() >= grace && begun.elapsed() < FOREVER / 2);
    assert_eq!(code, 1, "{written}");
    assert!(written.contains("\nasked\n"), "{written}");
    assert!(written.ends_with("error: rank 1 exited with code 1; the others ended after it\n"), "{written}");
}

#[test]
fn ranks_that_do_not_end_though_asked_are_killed_with_what_they_started() {
    let script = format!("[ $RANK = 1 ] && {{ {WAIT}; exit 2; }}; trap '' TERM; sleep 60 & echo $! >&2; : > $0; wait");
    let (grace, patience) = (Duration::ZERO, Duration::from_millis(300));
    let begun = Instant::now();
    let (code, written) = run(Job { grace, patience, ..job(2, &script) });
    assert!(begun.elapsed() >= patience && begun.elapsed() < FOREVER / 2);
    // That the other was killed is the launcher's doing and no failure of its own.
    assert_eq!(code, 2, "{written}");
    assert!(written.ends_with("error: rank 1 exited with code 2; the others ended after it\n"), "{written}");
    let started: u32 = written.lines().find_map(|line| line.parse().ok()).unwrap();
    wait_until(|| !lives(started));
}

/// Whether a process has not ended; one that nobody has reaped yet has, and has closed its files.
fn lives(process: u32) -> bool {
    fs::read_link(format!("/proc/{process}/fd/0")).is_ok()
}

fn wait_until(done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < FOREVER / 2);
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn ranks_are_out_of_reach_of_the_terminals_ctrl_c() {
    let (_, written) = run(job(2, "read -r _ _ _ _ group _ < /proc/$$/stat; [ $group = $$ ] && echo own >&2"));
    assert_eq!(written.matches("own").count(), 2, "{written}");
}

#[test]
fn what_cannot_be_started_is_an_error_and_leaves_nothing_behind() {
    let written: Sink = Arc::new(Mutex::new(Written::default()));
    let absent = Job { program: "/absent".into(), ..job(2, "") };
    let error = supervise(&absent, &written, &|_| {}, &AtomicBool::new(false)).unwrap_err();
    assert!(format!("{error:#}").contains("cannot start rank 0: No such file"), "{error:#}");
    let rank = Rank::start(&job(1, "exec sleep 60"), 0, &written, &mpsc::channel().0).unwrap();
    let process = rank.child.id();
    assert!(lives(process));
    drop(rank);
    assert!(!lives(process));
}

/// This test program, to run one of its tests and nothing else.
fn this_program(test: &str) -> (PathBuf, [OsString; 3]) {
    let (_, module) = module_path!().split_once("::").unwrap();
    (std::env::current_exe().unwrap(), ["--exact".into(), format!("{module}::{test}").into(), "--nocapture".into()])
}

/// Says where [`acts_as_launcher`] and [`acts_as_rank`] are to write; without it they do nothing.
const FOLDER: &str = "DRAFTHORSE_TEST_FOLDER";

#[test]
fn acts_as_rank() {
    let Some(folder) = std::env::var_os(FOLDER).filter(|_| std::env::var_os(LAUNCHED).is_some()) else { return };
    assert!(end_with_launcher().unwrap());
    let file = PathBuf::from(folder).join(std::env::var("RANK").unwrap());
    fs::write(file.with_extension("part"), std::process::id().to_string()).unwrap();
    fs::rename(file.with_extension("part"), file).unwrap();
    thread::sleep(FOREVER);
}

#[test]
fn acts_as_launcher() {
    if std::env::var_os(FOLDER).is_none() || std::env::var_os(LAUNCHED).is_some() {
        return;
    }
    assert!(!end_with_launcher().unwrap());
    let (program, arguments) = this_program("acts_as_rank");
    run(Job { program, arguments: arguments.into(), ..job(2, "") });
}

#[test]
fn ranks_end_with_their_launcher_even_when_it_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let (program, arguments) = this_program("acts_as_launcher");
    let mut launcher = Command::new(program)
        .args(arguments)
        .env(FOLDER, folder.path())
        .env_remove(LAUNCHED)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let files = [0, 1].map(|rank: usize| folder.path().join(rank.to_string()));
    wait_until(|| files.iter().all(|file| file.exists()));
    let ranks: [u32; 2] = files.map(|file| fs::read_to_string(file).unwrap().parse().unwrap());
    // They live for as long as the launcher does.
    thread::sleep(3 * POLL);
    assert!(ranks.into_iter().all(lives));
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    wait_until(|| !ranks.into_iter().any(lives));
}

#[test]
fn a_rank_whose_launcher_is_gone_exits_with_130() {
    let folder = tempfile::tempdir().unwrap();
    let (program, arguments) = this_program("acts_as_rank");
    let mut rank = Command::new(program)
        .args(arguments)
        .envs([(FOLDER, folder.path().as_os_str()), (LAUNCHED, "1".as_ref()), ("RANK", "0".as_ref())])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    assert_eq!(rank.wait().unwrap().code(), Some(130));
}
