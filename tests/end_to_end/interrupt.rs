//! Sends a signal to a command once it has said something.

use std::io::{BufRead, BufReader};
use std::process::{Command, ExitStatus, Stdio};

/// Runs until stderr has a line with `words`, then sends the signal; gives how the process ended and what it said.
pub(crate) fn after(command: &mut Command, words: &str, signal: &str) -> (ExitStatus, String) {
    let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let pid = child.id();
    let mut said = String::new();
    let mut sent = false;
    for line in BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap) {
        if !sent && line.contains(words) {
            // The shell's own `kill`: a small system may have no other.
            assert!(Command::new("sh").args(["-c", &format!("kill {signal} {pid}")]).status().unwrap().success());
            sent = true;
        }
        said.push_str(&line);
        said.push('\n');
    }
    assert!(sent, "`{words}` was never said:\n{said}");
    (child.wait().unwrap(), said)
}
