//! `drafthorse launch`: copies of this executable, one a device, that find each other as torchrun's would.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, IsTerminal, Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::num::NonZero;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, value_parser};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};

use crate::progress::Progress;

#[cfg(test)]
mod tests;

/// Tells a rank that its stdin is the launcher's hold on it.
const LAUNCHED: &str = "DRAFTHORSE_LAUNCHER";

/// The exit code of a launched rank that ends only because another rank failed, left or is gone. Rank 0 waits until the others have
/// heard why it fails, so that these end first, and the launcher would take one of them for the cause.
pub(crate) const BECAUSE_OF_ANOTHER: u8 = 5;

/// With this variable of torchrun's, rank 0 would look for a store that torchrun serves; here rank 0 serves it.
const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";

/// How often the wish to stop is looked for.
const POLL: Duration = Duration::from_millis(100);

/// How long a rank that was asked to end, after another failed, has before it is killed.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long to wait for the last lines of a rank that has ended: a process it left behind may hold its streams open for good.
const LAST_LINES: Duration = Duration::from_secs(1);

/// A line longer than this is cut, so that a stream without line ends does not fill the memory.
const LONGEST_LINE: u64 = 1 << 16;

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct LaunchArgs {
    /// Ranks on this node, one a device; the same on every node. Default: the number of CUDA devices, or 1 where there are none.
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=256))]
    nproc: Option<u16>,
    /// Nodes; `drafthorse launch` is started once on each.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u16).range(1..=4096))]
    nnodes: u16,
    /// Which of the nodes this is, from 0. Needed with several nodes.
    #[arg(long, value_name = "R")]
    node_rank: Option<u16>,
    /// Where the ranks meet: node 0's name or address as all can reach it, and a free port there. Needed with several nodes.
    #[arg(long, value_name = "HOST:PORT")]
    rendezvous: Option<String>,
    /// How long the other ranks may go on after one failed, to end with their own message, before they are made to end.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = value_parser!(u64).range(0..=86400))]
    grace: u64,
    /// What every rank does: a subcommand of drafthorse with its arguments.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

const EXAMPLES: &str = "\
One node, one rank for each of its GPUs; then two ranks on a node that has none:
  drafthorse launch -- run recipe.toml
  drafthorse launch --nproc 2 -- run recipe.toml

Two nodes of eight GPUs, one line on each. The run folder must be on a file system that both see:
  drafthorse launch --nproc 8 --nnodes 2 --node-rank 0 --rendezvous node0:29500 -- run recipe.toml
  drafthorse launch --nproc 8 --nnodes 2 --node-rank 1 --rendezvous node0:29500 -- run recipe.toml

Under Slurm, one launcher a node:
  srun --nodes 2 --ntasks-per-node 1 bash -c 'drafthorse launch --nproc 8 --nnodes $SLURM_NNODES --node-rank $SLURM_NODEID \\
    --rendezvous $(scontrol show hostnames | head -n 1):29500 -- run recipe.toml'

Every rank gets the variables that torchrun sets (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR,
MASTER_PORT), so torchrun itself does as well:
  torchrun --standalone --nproc-per-node 8 --no-python drafthorse run recipe.toml

Rank 0 writes as it would alone. What the others write comes on stderr, each line after the rank, as in `[rank 3] ...`. Options
for the ranks go after `--`, `--log-format` too; before it, that one is for what the launcher says.

Ctrl-C and SIGTERM let every rank finish its step and save; a second one ends them all at once. OMP_NUM_THREADS is the node's
cores divided among its ranks, unless it is set. Exit codes: 0 all ranks are done, 1 a rank failed (the one that failed by
itself is named), 2 bad usage or recipe, 3 interrupted and resumable.";

/// What is wrong with the command line: exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct BadLaunch(String);

/// Starts the ranks of this node and stays until all have ended; gives the exit code.
pub(crate) fn launch(args: &LaunchArgs, devices: usize, progress: &Progress, stop: &AtomicBool) -> anyhow::Result<u8> {
    if std::env::var_os(LAUNCHED).is_some() {
        return Err(BadLaunch("a launched rank cannot launch ranks; one `drafthorse launch` starts them all".into()).into());
    }
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let cores_to_share = std::env::var_os("OMP_NUM_THREADS").is_none().then_some(cores);
    let job = Job {
        program: std::env::current_exe().context("cannot find the executable to start")?,
        arguments: args.command.clone(),
        place: Place::new(args, devices)?,
        cores_to_share,
        terminal: std::io::stderr().is_terminal(),
        grace: Duration::from_secs(args.grace),
        patience: PATIENCE,
    };
    let say = |line: Line| match line {
        Line::Note(text) => progress.note(&text),
        Line::Error(text) => progress.error(&text),
    };
    supervise(&job, &(Arc::new(Mutex::new(std::io::stderr())) as Sink), &say, stop)
}

/// In a launched rank, ends the process when its launcher is gone, however that ended. Says whether this is a launched rank.
///
/// The launcher holds the other end of a rank's stdin and never writes to it; the system closes it even if that is killed.
pub(crate) fn end_with_launcher() -> std::io::Result<bool> {
    if std::env::var_os(LAUNCHED).is_none() {
        return Ok(false);
    }
    thread::Builder::new().name("launcher".into()).spawn(|| {
        // Whether the stream ends or breaks, nobody is left at its other end.
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        // Without destructors: those of a process group may wait for ranks that have ended.
        signal_hook::low_level::exit(130)
    })?;
    Ok(true)
}

/// Where the ranks of this node are among all, and where all meet.
#[derive(Debug, Clone)]
struct Place {
    nproc: usize,
    nnodes: usize,
    node: usize,
    host: String,
    port: u16,
}

impl Place {
    fn new(args: &LaunchArgs, devices: usize) -> anyhow::Result<Self> {
        let nproc = args.nproc.map_or(devices.max(1), usize::from);
        let (nnodes, node) = (usize::from(args.nnodes), usize::from(args.node_rank.unwrap_or(0)));
        let bad = |message: String| Err(BadLaunch(message).into());
        match args.command.first() {
            None => return bad("nothing to launch; give it after `--`: drafthorse launch --nproc 2 -- run recipe.toml".into()),
            Some(first) if first == "launch" => {
                return bad(
                    "`launch` cannot launch itself; after `--` goes what every rank does, as in `-- run recipe.toml`".into()
                );
            }
            Some(_) => {}
        }
        let missing: Vec<&str> = [
            (args.node_rank.is_none(), "--node-rank (0 on the first node)"),
            (args.rendezvous.is_none(), "--rendezvous (node 0's HOST:PORT)"),
        ]
        .into_iter()
        .filter_map(|(missing, name)| (missing && nnodes > 1).then_some(name))
        .collect();
        if !missing.is_empty() {
            return bad(format!("--nnodes {nnodes} also needs {}", missing.join(" and ")));
        }
        if node >= nnodes {
            return bad(format!("--node-rank {node} is not below --nnodes {nnodes}; the nodes count from 0"));
        }
        let (host, port) = match &args.rendezvous {
            Some(address) => match host_and_port(address) {
                Some(split) => split,
                None => return bad(format!("--rendezvous {address} is not HOST:PORT, as in node0:29500")),
            },
            None => (Ipv4Addr::LOCALHOST.to_string(), free_port().context("cannot find a free port for the ranks to meet at")?),
        };
        Ok(Self { nproc, nnodes, node, host, port })
    }

    fn rank(&self, local: usize) -> usize {
        self.node * self.nproc + local
    }

    fn world(&self) -> usize {
        self.nnodes * self.nproc
    }
}

fn host_and_port(address: &str) -> Option<(String, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    // Without brackets, the end of an IPv6 address would be taken for the port.
    let host = bare.or((!host.contains(':')).then_some(host)).filter(|host| !host.is_empty())?;
    Some((host.to_string(), port.parse().ok().filter(|&port| port != 0)?))
}

/// A port that was free a moment ago on all of the node's addresses, as rank 0 will listen on them all.
fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?.local_addr()?.port())
}

/// What to start, how often, and how long to wait for it.
struct Job {
    program: PathBuf,
    arguments: Vec<OsString>,
    place: Place,
    /// Set unless the user said how many threads a rank has.
    cores_to_share: Option<usize>,
    /// Whether stderr is a terminal, where rank 0 draws its progress.
    terminal: bool,
    grace: Duration,
    patience: Duration,
}

impl Job {
    fn command(&self, local: usize) -> Command {
        let place = &self.place;
        let mut command = Command::new(&self.program);
        let variables = [
            ("RANK", place.rank(local)),
            ("LOCAL_RANK", local),
            ("WORLD_SIZE", place.world()),
            ("LOCAL_WORLD_SIZE", place.nproc),
            ("GROUP_RANK", place.node),
            ("MASTER_PORT", usize::from(place.port)),
        ];
        command.args(&self.arguments).envs(variables.map(|(name, value)| (name, value.to_string())));
        command.env("MASTER_ADDR", &place.host).env(LAUNCHED, "1").env_remove(AGENT_STORE);
        if let Some(cores) = self.cores_to_share {
            command.env("OMP_NUM_THREADS", (cores / place.nproc).max(1).to_string());
        }
        command.stdin(Stdio::piped());
        if place.rank(local) != 0 {
            command.stdout(Stdio::piped());
        }
        // Rank 0 has the terminal to itself as far as its progress goes. Into a file all write line by line, or lines would mix.
        if place.rank(local) != 0 || (place.nproc > 1 && !self.terminal) {
            command.stderr(Stdio::piped());
        }
        // A terminal sends Ctrl-C to the launcher's process group; the ranks are told by the launcher, once.
        command.process_group(0);
        command
    }
}

/// Where the ranks' lines go.
type Sink = Arc<Mutex<dyn Write + Send>>;

/// A line of the launcher's own.
enum Line {
    Note(String),
    Error(String),
}

/// One started process.
struct Rank {
    number: usize,
    child: Child,
    pid: Pid,
    ended: bool,
    /// Disconnected once all that the rank wrote was passed on.
    open_streams: Receiver<()>,
}

impl Rank {
    /// Starts a rank; its `local` number goes to `ended` when it has ended.
    fn start(job: &Job, local: usize, sink: &Sink, ended: &Sender<usize>) -> anyhow::Result<Self> {
        let number = job.place.rank(local);
        let child = job.command(local).spawn().with_context(|| format!("cannot start rank {number}"))?;
        let pid = Pid::from_child(&child);
        let (stream, open_streams) = mpsc::channel();
        let mut rank = Self { number, child, pid, ended: false, open_streams };
        let prefix = if number == 0 { String::new() } else { format!("[rank {number}] ") };
        // On a terminal the cursor stands after rank 0's progress: that line is cleared first, and rank 0 draws it again.
        let prefix = if job.terminal { format!("\r\x1b[2K{prefix}") } else { prefix };
        let streams = [
            rank.child.stdout.take().map(|out| Box::new(out) as Box<dyn Read + Send>),
            rank.child.stderr.take().map(|err| Box::new(err) as Box<dyn Read + Send>),
        ];
        for from in streams.into_iter().flatten() {
            let (sink, prefix, stream) = (Arc::clone(sink), prefix.clone(), stream.clone());
            thread::Builder::new().spawn(move || {
                pass_lines(from, &prefix, &sink);
                drop(stream);
            })?;
        }
        let ended = ended.clone();
        thread::Builder::new().spawn(move || {
            // Only looks: until the rank is reaped, its process id names no other process, so that it is safe to signal.
            let _ = rustix::io::retry_on_intr(|| waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT));
            let _ = ended.send(local);
        })?;
        Ok(rank)
    }

    fn reap(&mut self) -> anyhow::Result<ExitStatus> {
        let status = self.child.wait().with_context(|| format!("cannot learn how rank {} ended", self.number))?;
        self.ended = true;
        Ok(status)
    }

    fn wait_for_last_lines(&self) {
        let _ = self.open_streams.recv_timeout(LAST_LINES);
    }

    fn ask_to_end(&self) {
        if !self.ended {
            // It cannot be gone, only ended and not yet reaped, and then there is nothing to ask.
            let _ = kill_process(self.pid, Signal::TERM);
        }
    }

    fn kill(&self) {
        if !self.ended {
            let _ = kill_process_group(self.pid, Signal::KILL);
        }
    }
}

impl Drop for Rank {
    /// No rank outlives an error of the launcher's.
    fn drop(&mut self) {
        if !self.ended {
            self.kill();
            let _ = self.child.wait();
        }
    }
}

/// Passes a stream on in whole lines.
fn pass_lines(from: impl Read, prefix: &str, sink: &Sink) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    loop {
        line.clear();
        line.extend_from_slice(prefix.as_bytes());
        match from.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) if !line.ends_with(b"\n") => line.push(b'\n'),
            Ok(_) => {}
        }
        if let Ok(mut sink) = sink.lock() {
            // If nobody can be told, the rank must still not come to a halt on a full pipe.
            let _ = sink.write_all(&line);
        }
    }
}

/// How a rank failed.
struct Failure {
    rank: usize,
    status: ExitStatus,
}

impl Failure {
    /// Whether the rank did not say that it ended because of another one.
    fn is_own(&self) -> bool {
        self.status.code() != Some(i32::from(BECAUSE_OF_ANOTHER))
    }

    /// Whether it was killed, which cannot be the consequence of another rank's end. An abort can, though the rank does not say so:
    /// libtorch aborts a rank whose peer is silent.
    fn is_kill(&self) -> bool {
        self.status.signal().is_some_and(|signal| signal != signal_hook::consts::SIGABRT)
    }

    /// The one of several, in the order in which they were seen, that the others follow from.
    fn cause(failures: &[Self]) -> Option<&Self> {
        // A process that was killed may be seen to have ended only after those that noticed: its device memory is torn down first.
        let kill = failures.iter().find(|failure| failure.is_kill());
        kill.or_else(|| failures.iter().find(|failure| failure.is_own())).or(failures.first())
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.status.code(), self.status.signal()) {
            _ if !self.is_own() => write!(f, "rank {} ended because of another rank", self.rank),
            (Some(code), _) => write!(f, "rank {} exited with code {code}", self.rank),
            (None, Some(signal)) => {
                let name = signal_hook::low_level::signal_name(signal).unwrap_or("no name");
                write!(f, "rank {} was killed by signal {signal} ({name})", self.rank)
            }
            (None, None) => write!(f, "rank {}: {}", self.rank, self.status),
        }
    }
}

/// Starts the ranks and stays until all have ended; gives the exit code.
fn supervise(job: &Job, sink: &Sink, say: &dyn Fn(Line), stop: &AtomicBool) -> anyhow::Result<u8> {
    let (sender, ends) = mpsc::channel();
    let mut ranks: Vec<Rank> =
        (0..job.place.nproc).map(|local| Rank::start(job, local, sink, &sender)).collect::<anyhow::Result<_>>()?;
    drop(sender);
    let (mut asked, mut killed, mut interrupted) = (false, false, false);
    let mut failures: Vec<Failure> = Vec::new();
    let mut first_failure: Option<Instant> = None;
    let mut ended_after_it = 0;
    while ranks.iter().any(|rank| !rank.ended) {
        match ends.recv_timeout(POLL) {
            Ok(local) => {
                let status = ranks[local].reap()?;
                ended_after_it += usize::from(first_failure.is_some());
                // Whoever was told to end did not fail, whether it had begun to listen for signals or not.
                let told = (asked && status.signal() == Some(signal_hook::consts::SIGTERM))
                    || (killed && status.signal() == Some(signal_hook::consts::SIGKILL));
                if status.code() == Some(3) || told {
                    interrupted = true;
                } else if !status.success() {
                    // What the rank said itself comes before what is said about it.
                    ranks[local].wait_for_last_lines();
                    let failure = Failure { rank: ranks[local].number, status };
                    let left = ranks.iter().filter(|rank| !rank.ended).count();
                    if left > 0 && first_failure.is_none() {
                        say(Line::Note(format!("{failure}; the others have {} s to end", job.grace.as_secs_f64())));
                    }
                    first_failure.get_or_insert_with(Instant::now);
                    failures.push(failure);
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => anyhow::bail!("the ranks' ends can no longer be seen"),
        }
        if !asked && stop.load(Ordering::Relaxed) {
            ranks.iter().for_each(Rank::ask_to_end);
            asked = true;
        }
        let Some(first_failure) = first_failure.filter(|_| ranks.iter().any(|rank| !rank.ended)) else { continue };
        if !asked && first_failure.elapsed() >= job.grace {
            say(Line::Note("the others have not ended; asking them to".into()));
            ranks.iter().for_each(Rank::ask_to_end);
            asked = true;
        }
        if !killed && first_failure.elapsed() >= job.grace + job.patience {
            say(Line::Note("the others have not ended though asked; killing them".into()));
            ranks.iter().for_each(Rank::kill);
            killed = true;
        }
    }
    ranks.iter().for_each(Rank::wait_for_last_lines);
    let Some(cause) = Failure::cause(&failures) else {
        return Ok(if interrupted { 3 } else { 0 });
    };
    let others = if ended_after_it > 0 { "; the others ended after it" } else { "" };
    // Where every rank of this node ended because of another, that one cannot be among them.
    if !cause.is_own() && job.place.nnodes > 1 && failures.len() == ranks.len() {
        say(Line::Error(format!("rank {} ended because of a rank on another node{others}", cause.rank)));
    } else {
        say(Line::Error(format!("{cause}{others}")));
    }
    Ok(if cause.status.code() == Some(2) { 2 } else { 1 })
}
