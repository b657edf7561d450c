//! Where the numbers of a run go: one line of JSON each (`metrics.jsonl`, which tests and the report read) and TensorBoard events.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tensorboard_rs::summary_writer::SummaryWriter;

/// A place that takes named numbers at a step.
pub trait MetricSink {
    /// Numbers of one kind at one step of one stage, such as `loss`, `learning_rate`.
    fn record(&mut self, stage: &str, step: u64, values: &[(&str, f64)]) -> io::Result<()>;
}

/// `metrics.jsonl`: `{"stage": …, "step": …, NAME: number, …}`, a line each.
pub struct JsonLines {
    path: PathBuf,
}

impl JsonLines {
    /// Appends to the file at `path`.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_path_buf() }
    }

    /// Drops the lines of `stage` later than `step`, since those steps run again, and any that a killed process left half-written.
    pub fn rewind(path: &Path, stage: &str, step: u64) -> io::Result<()> {
        if !path.exists() {
            return Ok(());
        }
        let text = fs::read_to_string(path)?;
        let keep = |line: &&str| {
            serde_json::from_str::<Value>(line).is_ok_and(|line| line["stage"] != stage || line["step"].as_u64() <= Some(step))
        };
        let kept: String = text.lines().filter(keep).flat_map(|line| [line, "\n"]).collect();
        data::files::write_atomically(path, kept.as_bytes())
    }
}

impl MetricSink for JsonLines {
    fn record(&mut self, stage: &str, step: u64, values: &[(&str, f64)]) -> io::Result<()> {
        let mut line: Map<String, Value> = Map::new();
        line.insert("stage".to_string(), json!(stage));
        line.insert("step".to_string(), json!(step));
        line.extend(values.iter().map(|&(name, value)| (name.to_string(), json!(value))));
        let mut file = OpenOptions::new().create(true).append(true).open(&self.path)?;
        file.write_all(format!("{}\n", Value::Object(line)).as_bytes())
    }
}

/// TensorBoard event files, all stages of a run on one folder, tags `STAGE/NAME`.
pub struct TensorBoard {
    folder: PathBuf,
    /// Gone once writing failed.
    writer: Option<SummaryWriter>,
}

impl TensorBoard {
    /// Opens a new event file in `folder`.
    pub fn create(folder: &Path) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        Ok(Self { folder: folder.to_path_buf(), writer: Some(SummaryWriter::new(folder)) })
    }
}

impl MetricSink for TensorBoard {
    fn record(&mut self, stage: &str, step: u64, values: &[(&str, f64)]) -> io::Result<()> {
        // The writer's thread panics when the disk is full, then so does whoever sends to it, and the writer's drop once more: what
        // failed is never dropped.
        let written = self.writer.take().map(ManuallyDrop::new).and_then(|mut writer| {
            let write = AssertUnwindSafe(|| {
                for (name, value) in values {
                    writer.add_scalar(&format!("{stage}/{name}"), *value as f32, step as usize);
                }
                writer.flush();
            });
            catch_unwind(write).ok().map(|()| ManuallyDrop::into_inner(writer))
        });
        self.writer = written;
        let failed =
            || io::Error::other(format!("the event file in `{}` cannot be written; is the disk full?", self.folder.display()));
        if self.writer.is_some() { Ok(()) } else { Err(failed()) }
    }
}

impl Drop for TensorBoard {
    fn drop(&mut self) {
        let writer = self.writer.take();
        // What the last flush could not write is lost with it; the numbers are in `metrics.jsonl` as well.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(writer)));
    }
}

/// Hands every record to several sinks.
pub struct Sinks(pub Vec<Box<dyn MetricSink>>);

impl MetricSink for Sinks {
    fn record(&mut self, stage: &str, step: u64, values: &[(&str, f64)]) -> io::Result<()> {
        self.0.iter_mut().try_for_each(|sink| sink.record(stage, step, values))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn resuming_drops_the_steps_that_run_again_and_half_written_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        JsonLines::rewind(&path, "train", 0).unwrap();
        let mut sink = JsonLines::new(&path);
        for step in 1..=3 {
            sink.record("train", step, &[("loss", 1.5)]).unwrap();
        }
        sink.record("recover", 3, &[("loss", 0.5)]).unwrap();
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"stage\":\"tr").unwrap();
        JsonLines::rewind(&path, "train", 2).unwrap();
        sink.record("train", 3, &[("loss", 1.25)]).unwrap();
        let steps: Vec<(String, u64)> = fs::read_to_string(&path)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap())
            .map(|line| (line["stage"].as_str().unwrap().to_string(), line["step"].as_u64().unwrap()))
            .collect();
        let expected = [("train", 1), ("train", 2), ("recover", 3), ("train", 3)];
        assert_eq!(steps, expected.map(|(stage, step)| (stage.to_string(), step)));
    }

    #[test]
    fn a_full_disk_is_an_error_of_the_event_file_and_no_abort() {
        let folder = tempfile::tempdir().unwrap();
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        // Whatever name the writer takes in the next seconds leads to a device that is always full.
        for second in now..now + 60 {
            let name = format!("events.out.tfevents.{second:010}.{}.{}.0", host.trim(), std::process::id());
            std::os::unix::fs::symlink("/dev/full", folder.path().join(name)).unwrap();
        }
        let mut board = TensorBoard::create(folder.path()).unwrap();
        let begun = std::time::Instant::now();
        // The writer's thread takes its time to notice.
        let error = loop {
            assert!(begun.elapsed().as_secs() < 30, "a full disk went unnoticed");
            if let Err(error) = board.record("train", 1, &[("loss", 1.5)]) {
                break error;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        };
        assert!(error.to_string().contains("cannot be written"), "{error}");
        drop(board);
    }
}
