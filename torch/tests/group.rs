//! Several processes on one machine: each test starts itself again once a rank, with `--exact` and the environment of a launcher.
#![allow(clippy::unwrap_used)]

use std::net::{TcpListener, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use torch::group::{Group, GroupError, Place};
use torch::tch::{Device, Kind, Tensor};
use torch::{from_bytes, to_bytes, to_f32s};

/// Set in a rank; the value is the time-out in seconds.
const IN_A_RANK: &str = "DRAFTHORSE_TEST_TIMEOUT";

/// How a rank ended: whether well, what it printed on a line `ERROR: `, and everything.
struct Ended {
    well: bool,
    error: String,
    output: String,
}

/// Where this process is a rank: joins the group.
fn in_a_rank() -> Option<Result<Group, GroupError>> {
    let seconds = std::env::var(IN_A_RANK).ok()?.parse().unwrap();
    let place = Place::from_environment(|name| std::env::var(name).ok()).unwrap().unwrap();
    Some(Group::join(&place, Device::Cpu, Duration::from_secs(seconds)))
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn start(test: &str, rank: usize, world: usize, port: u16, timeout: u64) -> Child {
    start_at("127.0.0.1", test, rank, world, port, timeout)
}

/// With what a launcher sets at the least.
fn start_at(master: &str, test: &str, rank: usize, world: usize, port: u16, timeout: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(IN_A_RANK, timeout.to_string())
        .env("RANK", rank.to_string())
        .env_remove("LOCAL_RANK")
        .env("WORLD_SIZE", world.to_string())
        .env_remove("LOCAL_WORLD_SIZE")
        .env("MASTER_ADDR", master)
        .env("MASTER_PORT", port.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits for a rank, but not for ever.
fn end(mut child: Child) -> Ended {
    let deadline = Instant::now() + Duration::from_secs(120);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("a rank hangs");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let error = text.lines().find_map(|line| line.split_once("ERROR: ")).map(|(_, error)| error.to_string());
    Ended { well: output.status.success(), error: error.unwrap_or_default(), output: text }
}

fn run(test: &str, world: usize, timeout: u64) -> Vec<Ended> {
    let port = free_port();
    let ranks: Vec<Child> = (0..world).map(|rank| start(test, rank, world, port, timeout)).collect();
    ranks.into_iter().map(end).collect()
}

fn assert_well(ranks: &[Ended]) {
    for (rank, ended) in ranks.iter().enumerate() {
        assert!(ended.well, "rank {rank} of {}: {}", ranks.len(), ended.output);
    }
}

fn kill(signal: &str) {
    let pid = std::process::id();
    let _ = Command::new("sh").args(["-c", &format!("kill -{signal} {pid}")]).status();
    std::thread::sleep(Duration::from_secs(30));
}

/// Returns when every rank has come here.
fn barrier(group: &Group) -> Result<(), GroupError> {
    group.all_reduce_sum(&mut [0.0])
}

/// Prints the error for the parent, tells the others, and goes on to the end of the process.
fn print_error<T>(group: &Group, result: Result<T, GroupError>) {
    let error = result.err().unwrap();
    println!("ERROR: {error}");
    group.fail(&error.to_string());
}

fn collectives(group: &Group) {
    let (rank, world) = (group.rank() as f32, group.world());
    let shard = Tensor::from_slice(&[rank, rank + 0.5, -rank]);
    let expected: Vec<f32> = (0..world).flat_map(|r| [r as f32, r as f32 + 0.5, -(r as f32)]).collect();
    let [first, second] = [shard.shallow_clone(), &shard * 2.0].map(|shard| group.start_all_gather(&shard).unwrap());
    // Taken in the other order: both are under way at once.
    let doubled: Vec<f32> = expected.iter().map(|value| value * 2.0).collect();
    assert_eq!(to_f32s(&second.wait().unwrap()), doubled);
    assert_eq!(to_f32s(&first.wait().unwrap()), expected);

    let bf16 = from_bytes(&[0x80 + group.rank() as u8, 0x3f, 0x00, 0xc0], &[2], Kind::BFloat16).unwrap();
    let gathered = group.start_all_gather(&bf16).unwrap().wait().unwrap();
    let bytes: Vec<u8> = (0..world).flat_map(|r| [0x80 + r as u8, 0x3f, 0x00, 0xc0]).collect();
    assert_eq!((gathered.kind(), to_bytes(&gathered).unwrap()), (Kind::BFloat16, bytes));

    // A gradient: needs grad, and is not changed.
    let whole = Tensor::arange((2 * world) as i64, (Kind::Float, Device::Cpu)) + f64::from(rank);
    let whole = whole.set_requires_grad(true);
    let before = to_f32s(&whole);
    let slice = to_f32s(&group.reduce_scatter(&whole).unwrap());
    let ranks: f32 = (0..world).map(|r| r as f32).sum();
    let sum = |index: usize| (index * world) as f32 + ranks;
    assert_eq!(slice, [sum(2 * group.rank()), sum(2 * group.rank() + 1)]);
    assert_eq!(to_f32s(&whole), before);
}

fn words(group: &Group) {
    let (rank, world) = (group.rank(), group.world());
    let mut values = [rank as f64, 1.0, 1e-9];
    group.all_reduce_sum(&mut values).unwrap();
    assert_eq!(values[0], (0..world).sum::<usize>() as f64);
    assert_eq!(values[1], world as f64);
    assert!((values[2] - world as f64 * 1e-9).abs() < 1e-20, "in f64");

    let bytes = vec![rank as u8; rank * 1000];
    let all = group.all_gather_bytes(&bytes).unwrap();
    assert_eq!(all, (0..world).map(|r| vec![r as u8; r * 1000]).collect::<Vec<_>>());
    assert_eq!(group.all_gather_bytes(&[]).unwrap(), vec![Vec::<u8>::new(); world]);

    if group.leads() {
        std::thread::sleep(Duration::from_millis(300));
        group.announce("first", b"one").unwrap();
        group.announce("second", b"").unwrap();
    } else {
        assert_eq!(group.await_announcement("first").unwrap(), b"one");
        assert_eq!(group.await_announcement("second").unwrap(), b"");
    }

    // Nobody goes on before the last is there, which may take longer than a collective may.
    for last in 0..world {
        let begun = Instant::now();
        if rank == last && world > 1 {
            std::thread::sleep(Duration::from_secs(1));
        }
        let mut looks = 0;
        group.meet(&mut || looks += 1).unwrap();
        assert!(world == 1 || begun.elapsed() >= Duration::from_millis(300), "rank {rank} went on alone");
        assert!(world == 1 || rank == last || looks > 0);
    }
}

#[test]
fn every_collective_gives_what_it_says() {
    if let Some(group) = in_a_rank() {
        let group = group.unwrap();
        collectives(&group);
        return words(&group);
    }
    for world in 1..=3 {
        assert_well(&run("every_collective_gives_what_it_says", world, 60));
    }
    collectives(&Group::alone());
    words(&Group::alone());
}

/// Stops this process in a second from now, and lets it go on so many seconds later.
fn stop_for(seconds: u64) {
    let pid = std::process::id();
    let script = format!("(sleep 1; kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}) > /dev/null 2>&1 &");
    assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
}

/// As between machines of which that of rank 0 takes its own name for a loopback.
#[test]
fn ranks_meet_though_only_rank_0_knows_its_machine_by_a_loopback() {
    const TEST: &str = "ranks_meet_though_only_rank_0_knows_its_machine_by_a_loopback";
    if let Some(group) = in_a_rank() {
        return collectives(&group.unwrap());
    }
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    if socket.connect("203.0.113.1:9").is_err() {
        eprintln!("skipped: this machine has no address but loopbacks");
        return;
    }
    let (address, port) = (socket.local_addr().unwrap().ip().to_string(), free_port());
    let ranks = ["localhost", "127.0.0.1", &address].into_iter().enumerate();
    let ranks: Vec<Child> = ranks.map(|(rank, master)| start_at(master, TEST, rank, 3, port, 60)).collect();
    assert_well(&ranks.into_iter().map(end).collect::<Vec<_>>());
}

#[test]
fn a_killed_rank_is_named() {
    if let Some(group) = in_a_rank() {
        let group = group.unwrap();
        barrier(&group).unwrap();
        if group.rank() == 1 {
            kill("KILL");
        }
        return print_error(&group, group.reduce_scatter(&Tensor::ones([3], (Kind::Float, Device::Cpu))));
    }
    let start = Instant::now();
    let ranks = run("a_killed_rank_is_named", 3, 60);
    assert!(!ranks[1].well);
    for survivor in [&ranks[0], &ranks[2]] {
        assert!(survivor.error.starts_with("rank 1 no longer answers: killed, or the machine is gone"), "{}", survivor.output);
    }
    assert!(start.elapsed() < Duration::from_secs(30), "long before the time-out");
}

#[test]
fn a_killed_keeper_of_the_store_is_named() {
    if let Some(group) = in_a_rank() {
        let group = group.unwrap();
        barrier(&group).unwrap();
        if group.rank() == 0 {
            kill("KILL");
        }
        return print_error(&group, barrier(&group));
    }
    let ranks = run("a_killed_keeper_of_the_store_is_named", 3, 60);
    for survivor in &ranks[1..] {
        assert!(survivor.error.contains("rank 0, which keeps it, was killed"), "{}", survivor.output);
    }
}

#[test]
fn a_rank_that_fails_is_quoted() {
    if let Some(group) = in_a_rank() {
        let group = group.unwrap();
        barrier(&group).unwrap();
        match group.rank() {
            2 => group.fail("disk full"),
            0 => print_error(&group, group.await_announcement("never")),
            // Comes late, when both others are gone, and still names the cause.
            _ => {
                std::thread::sleep(Duration::from_secs(6));
                print_error(&group, group.all_gather_bytes(b"x"));
            }
        }
        return;
    }
    let ranks = run("a_rank_that_fails_is_quoted", 3, 60);
    assert_well(&ranks);
    assert_eq!(ranks[0].error, "rank 2 failed: disk full", "{}", ranks[0].output);
    assert_eq!(ranks[1].error, "rank 2 failed: disk full", "{}", ranks[1].output);
}

#[test]
fn a_keeper_of_the_store_that_fails_is_heard() {
    if let Some(group) = in_a_rank() {
        let group = group.unwrap();
        barrier(&group).unwrap();
        if group.leads() {
            group.fail("no such file");
            // As the binary ends after an error: without destructors.
            std::process::exit(0);
        }
        std::thread::sleep(Duration::from_secs(2));
        return print_error(&group, barrier(&group));
    }
    let ranks = run("a_keeper_of_the_store_that_fails_is_heard", 2, 60);
    assert_well(&ranks);
    assert_eq!(ranks[1].error, "rank 0 failed: no such file", "{}", ranks[1].output);
}

#[test]
fn a_dead_rank_ends_the_waiting_for_an_announcement() {
    if let Some(group) = in_a_rank() {
        let group = group.unwrap();
        barrier(&group).unwrap();
        match group.rank() {
            // Works on, for longer than the collectives' time-out.
            0 => {
                std::thread::sleep(Duration::from_secs(22));
                print_error(&group, barrier(&group));
            }
            1 => kill("KILL"),
            _ => print_error(&group, group.await_announcement("plan")),
        }
        return;
    }
    let ranks = run("a_dead_rank_ends_the_waiting_for_an_announcement", 3, 5);
    for survivor in [&ranks[0], &ranks[2]] {
        assert!(survivor.error.starts_with("rank 1 no longer answers"), "{}", survivor.output);
        assert!(survivor.error.contains("waiting for rank 0 to announce `plan`"), "{}", survivor.output);
    }
}

#[test]
fn a_rank_that_is_late_is_named_by_the_time_out() {
    if let Some(group) = in_a_rank() {
        let group = group.unwrap();
        barrier(&group).unwrap();
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_secs(12));
        }
        return print_error(&group, barrier(&group));
    }
    let ranks = run("a_rank_that_is_late_is_named_by_the_time_out", 2, 4);
    assert_well(&ranks);
    assert!(
        ranks[0].error.starts_with("time-out of 4 s in all_reduce: rank 1 has not arrived, though it lives"),
        "{}",
        ranks[0].output
    );
    assert!(ranks[1].error.starts_with("rank 0 failed: time-out of 4 s in all_reduce"), "{}", ranks[1].output);
}

#[test]
fn a_rank_that_was_stopped_takes_nobody_for_dead() {
    if let Some(group) = in_a_rank() {
        let group = group.unwrap();
        barrier(&group).unwrap();
        if group.leads() {
            // Comes when the other, which nobody misses meanwhile, has long given up.
            std::thread::sleep(Duration::from_secs(16));
        } else {
            // Over the time-out of the collective, so that the first thing afterwards is to ask who is to blame.
            stop_for(7);
        }
        return print_error(&group, barrier(&group));
    }
    let ranks = run("a_rank_that_was_stopped_takes_nobody_for_dead", 2, 5);
    assert_well(&ranks);
    assert!(
        ranks[1].error.starts_with("time-out of 5 s in all_reduce: rank 0 has not arrived, though it lives"),
        "{}",
        ranks[1].output
    );
    assert!(ranks[0].error.starts_with("rank 1 failed: time-out of 5 s in all_reduce"), "{}", ranks[0].output);
}

#[test]
fn a_rank_that_is_stopped_for_long_is_the_only_one_to_blame() {
    if let Some(group) = in_a_rank() {
        let group = group.unwrap();
        barrier(&group).unwrap();
        match group.rank() {
            // Lives all the time.
            0 => {
                std::thread::sleep(Duration::from_secs(24));
                print_error(&group, barrier(&group));
            }
            1 => {
                stop_for(19);
                print_error(&group, group.await_announcement("go"));
            }
            _ => print_error(&group, group.await_announcement("go")),
        }
        return;
    }
    let ranks = run("a_rank_that_is_stopped_for_long_is_the_only_one_to_blame", 3, 60);
    assert_well(&ranks);
    for ended in &ranks {
        assert!(ended.error.starts_with("rank 1 no longer answers"), "{}", ended.output);
    }
}

#[test]
fn a_stopped_keeper_of_the_store_blames_nobody_when_it_goes_on() {
    if let Some(group) = in_a_rank() {
        let group = group.unwrap();
        barrier(&group).unwrap();
        if group.leads() {
            stop_for(6);
            std::thread::sleep(Duration::from_secs(2));
            // Rank 1 is late.
            return print_error(&group, barrier(&group));
        }
        std::thread::sleep(Duration::from_secs(16));
        return print_error(&group, barrier(&group));
    }
    let ranks = run("a_stopped_keeper_of_the_store_blames_nobody_when_it_goes_on", 2, 2);
    assert_well(&ranks);
    assert!(
        ranks[0].error.starts_with("time-out of 2 s in all_reduce: rank 1 has not arrived, though it lives"),
        "{}",
        ranks[0].output
    );
}

#[test]
fn rank_0_may_end_before_the_others() {
    if let Some(group) = in_a_rank() {
        let group = group.unwrap();
        barrier(&group).unwrap();
        let start = Instant::now();
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_secs(3));
        }
        if group.rank() == 2 {
            // Leaves at once, and is missed by nobody.
            return;
        }
        drop(group);
        assert!(start.elapsed() < Duration::from_secs(5));
        return;
    }
    assert_well(&run("rank_0_may_end_before_the_others", 3, 60));
}

#[test]
fn what_was_announced_is_found_after_rank_0_has_ended() {
    if let Some(group) = in_a_rank() {
        let group = group.unwrap();
        if group.leads() {
            group.announce("first", b"one").unwrap();
            group.announce("second", b"two").unwrap();
        } else {
            assert!(group.announce("third", b"").is_err());
            assert_eq!(group.await_announcement("first").unwrap(), b"one");
            std::thread::sleep(Duration::from_secs(2));
            assert_eq!(group.await_announcement("second").unwrap(), b"two");
            print_error(&group, group.await_announcement("third"));
        }
        return;
    }
    let ranks = run("what_was_announced_is_found_after_rank_0_has_ended", 3, 60);
    assert_well(&ranks);
    for ended in &ranks[1..] {
        assert!(ended.error.contains("rank 0 has already left the group"), "{}", ended.output);
    }
}

#[test]
fn a_group_may_move_to_another_thread() {
    fn movable<T: Send>() {}
    movable::<Group>();
    movable::<torch::group::Pending>();
}

#[test]
fn a_port_in_use_is_named() {
    if let Some(group) = in_a_rank() {
        println!("ERROR: {}", group.err().unwrap());
        return;
    }
    let holder = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = holder.local_addr().unwrap().port();
    let ended = end(start("a_port_in_use_is_named", 0, 2, port, 5));
    assert_eq!(
        ended.error,
        format!(
            "rank 0 cannot keep the store at 127.0.0.1:{port}: the port is in use; choose another MASTER_PORT or end the program \
             that holds it"
        ),
        "{}",
        ended.output
    );
}

#[test]
fn what_is_no_store_is_not_waited_for_without_end() {
    if let Some(group) = in_a_rank() {
        println!("ERROR: {}", group.err().unwrap());
        return;
    }
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let ended = end(start("what_is_no_store_is_not_waited_for_without_end", 1, 2, port, 1));
    assert!(ended.error.contains("something that is not a store accepts connections there"), "{}", ended.output);
}

#[test]
fn missing_ranks_are_counted_and_named() {
    if let Some(group) = in_a_rank() {
        println!("ERROR: {}", group.err().unwrap());
        return;
    }
    let port = free_port();
    let ended = end(start("missing_ranks_are_counted_and_named", 0, 2, port, 2));
    let expected = format!("only 1 of 2 ranks came to 127.0.0.1:{port} within 2 s: missing rank 1; see their logs");
    assert_eq!(ended.error, expected, "{}", ended.output);
    let ended = end(start("missing_ranks_are_counted_and_named", 1, 2, port, 2));
    let expected = format!("the store of rank 0 at 127.0.0.1:{port} cannot be reached within 2 s");
    assert!(ended.error.starts_with(&expected), "{}", ended.output);
}

#[test]
fn a_rank_taken_twice_is_refused() {
    if let Some(group) = in_a_rank() {
        match group {
            Ok(group) => drop(group),
            Err(error) => println!("ERROR: {error}"),
        }
        return;
    }
    let port = free_port();
    let ranks = [0, 1, 1].map(|rank| start("a_rank_taken_twice_is_refused", rank, 3, port, 4));
    let ranks = ranks.map(end);
    assert!(ranks.iter().any(|ended| ended.error.contains("another process has already come to")), "{}", ranks[1].output);
    assert!(ranks[0].error.starts_with("only 2 of 3 ranks came"), "{}", ranks[0].output);
}

#[test]
fn half_an_environment_is_refused() {
    let variables = |name: &str| (name == "RANK").then(|| "1".to_string());
    let message = Place::from_environment(variables).unwrap_err().to_string();
    assert!(message.contains("has RANK but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"), "{message}");
}

#[test]
fn nccl_is_refused_where_it_cannot_work() {
    let place = |world| Place {
        rank: 0,
        world,
        local_rank: 0,
        local_world: world,
        master_addr: "127.0.0.1".to_string(),
        master_port: free_port(),
        store_is_served: false,
    };
    let error = Group::join(&place(2), Device::Cuda(99), Duration::from_secs(1)).err().unwrap().to_string();
    let expected = if cfg!(feature = "nccl") { "cuda:99 is not available" } else { "build it with `--features nccl`" };
    assert!(error.contains(expected), "{error}");
}
