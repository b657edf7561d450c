//! Progress for a person (bars on a terminal, plain lines when not) or for a machine (a JSON object a line). All of it on stderr.

use std::cell::Cell;
use std::io::{ErrorKind, IsTerminal, Write};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

/// How progress is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Bars on a terminal, plain lines elsewhere.
    Text,
    /// One JSON object a line.
    Json,
}

/// How often a bar that is not drawn writes a line instead.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

/// Writes a line. That nobody reads any more, as when `tee` was interrupted first, is no reason to lose work.
fn to_stderr(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Writes a result, or a part of one.
///
/// # Errors
/// It cannot be written, but for a reader who has seen enough and left, as `head` does.
pub(crate) fn to_stdout(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to stdout"),
    }
}

/// Writes everything that is not a result.
pub(crate) struct Progress {
    format: LogFormat,
}

impl Progress {
    pub(crate) fn new(format: LogFormat) -> Self {
        Self { format }
    }

    /// Whether it is for a person at a terminal.
    pub(crate) fn is_drawn(&self) -> bool {
        self.format == LogFormat::Text && std::io::stderr().is_terminal()
    }

    /// A line that stays.
    pub(crate) fn note(&self, message: &str) {
        self.line("note", message, message);
    }

    /// What went wrong.
    pub(crate) fn error(&self, message: &str) {
        // Messages quote names from files, and an escape sequence in one must not disturb the terminal.
        let is_unsafe = |character: char| character.is_control() && character != '\n' && character != '\t';
        let shown: String = message.chars().map(|it| if is_unsafe(it) { '\u{fffd}' } else { it }).collect();
        self.line("error", message, &format!("error: {shown}"));
    }

    fn line(&self, kind: &str, message: &str, text: &str) {
        match self.format {
            LogFormat::Text => to_stderr(text),
            LogFormat::Json => to_stderr(&json!({ kind: message }).to_string()),
        }
    }

    /// A bar of `length` units under a title.
    pub(crate) fn bar(&self, title: &str, length: usize) -> Bar {
        let drawn = self.is_drawn();
        let target = if drawn { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(length as u64), target);
        let template = "{prefix:>12} {wide_bar} {pos}/{len} {msg} [{elapsed_precise} + {eta_precise}]";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_prefix(title.to_string());
        let begun = Instant::now();
        Bar {
            bar,
            drawn,
            format: self.format,
            title: title.to_string(),
            begun,
            last_line: Cell::new(None),
            first: Cell::new(None),
        }
    }
}

/// The progress of one piece of work.
pub(crate) struct Bar {
    bar: ProgressBar,
    drawn: bool,
    format: LogFormat,
    title: String,
    begun: Instant,
    last_line: Cell<Option<Instant>>,
    /// Where the work began, which is not 0 when it was resumed.
    first: Cell<Option<usize>>,
}

impl Bar {
    /// Moves to `done` units, with a message beside it.
    pub(crate) fn set(&self, done: usize, message: &str) {
        let first = self.first.get().unwrap_or_else(|| {
            let first = done.saturating_sub(1);
            self.first.set(Some(first));
            self.bar.reset_eta();
            first
        });
        self.bar.set_position(done as u64);
        self.bar.set_message(message.to_string());
        let length = self.bar.length().unwrap_or(0) as usize;
        let due = done >= length || self.last_line.get().is_none_or(|last| last.elapsed() >= PLAIN_INTERVAL);
        if self.drawn || !due {
            return;
        }
        self.last_line.set(Some(Instant::now()));
        let seconds = self.begun.elapsed().as_secs_f64();
        let left = seconds / done.saturating_sub(first).max(1) as f64 * length.saturating_sub(done) as f64;
        match self.format {
            LogFormat::Text => {
                to_stderr(&format!("{:>12} {done}/{length} {message} [{seconds:.0} s, {left:.0} s left]", self.title));
            }
            LogFormat::Json => {
                let line = json!({ "progress": self.title, "done": done, "of": length, "message": message, "seconds": seconds, "seconds_left": left });
                to_stderr(&line.to_string());
            }
        }
    }

    /// Sets how many units there are, once it is known.
    pub(crate) fn set_length(&self, length: usize) {
        self.bar.set_length(length as u64);
    }

    /// A line that stays above the bar.
    pub(crate) fn note(&self, message: &str) {
        match self.format {
            LogFormat::Json => to_stderr(&json!({ "note": message }).to_string()),
            LogFormat::Text => self.bar.suspend(|| to_stderr(message)),
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
