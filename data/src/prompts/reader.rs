//! A file of rows as a stream of JSON texts, whatever it is packed in: JSON Lines, one JSON array, or Parquet; the first two also
//! compressed with gzip or zstd. What a file is, its first bytes say and not its name. Never more than one row of it is in memory, and of
//! Parquet one page a column.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::bufread::MultiGzDecoder;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;

/// A longer row is no prompt; it is skipped without being held in memory.
const LONGEST_ROW: usize = 64 << 20;

/// How much of a row that is too long is kept to show it.
const SHOWN: usize = 1 << 10;

/// A row as it stands.
pub(crate) struct Raw {
    /// Where it begins, counted from 1; of Parquet the number of the row.
    pub(crate) line: usize,
    pub(crate) text: Vec<u8>,
    /// Why it cannot be one.
    pub(crate) fault: Option<String>,
}

/// The rows of a file, one after the other.
pub(crate) struct Reader {
    form: Form,
    /// Bytes of the file that were read; of Parquet, what its rows take on average.
    bytes_read: Arc<AtomicU64>,
}

enum Form {
    Lines(Text),
    Array(Text),
    Table { rows: RowIter<'static>, number: usize, bytes_per_row: f64 },
}

/// A file that counts what is read of it.
struct Counted {
    file: File,
    bytes_read: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.bytes_read.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// Characters on their way in.
pub(crate) struct Text {
    from: Box<dyn BufRead + Send>,
    line: usize,
    /// Of an array: whether its end was reached.
    ended: bool,
}

impl Reader {
    /// Opens a file and finds out what it is.
    ///
    /// # Errors
    /// When it cannot be read, or is in an encoding other than UTF-8.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let bytes_read = Arc::new(AtomicU64::new(0));
        let counted = Counted { file: File::open(path)?, bytes_read: Arc::clone(&bytes_read) };
        let length = counted.file.metadata()?.len();
        let mut plain = BufReader::with_capacity(1 << 18, counted);
        let start = peek(&mut plain)?;
        if start.starts_with(b"PAR1") {
            let file = SerializedFileReader::new(File::open(path)?).map_err(invalid)?;
            let bytes_per_row = length as f64 / file.metadata().file_metadata().num_rows().max(1) as f64;
            let form = Form::Table { rows: RowIter::from_file_into(Box::new(file)), number: 0, bytes_per_row };
            return Ok(Self { form, bytes_read });
        }
        let mut from: Box<dyn BufRead + Send> = match start.as_slice() {
            [0x1f, 0x8b, ..] => Box::new(BufReader::new(MultiGzDecoder::new(plain))),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Box::new(BufReader::new(zstd::stream::read::Decoder::with_buffer(plain)?)),
            _ => Box::new(plain),
        };
        let start = peek(&mut from)?;
        if start.starts_with(&[0xff, 0xfe]) || start.starts_with(&[0xfe, 0xff]) {
            return Err(invalid("it is UTF-16; rows must be UTF-8, so convert it, as with `iconv -f UTF-16 -t UTF-8`"));
        }
        if start.starts_with(b"\xef\xbb\xbf") {
            from.consume(3);
        }
        let mut text = Text { from, line: 1, ended: false };
        let is_array = text.opens_array()?;
        Ok(Self { form: if is_array { Form::Array(text) } else { Form::Lines(text) }, bytes_read })
    }

    /// The next row that is not blank.
    ///
    /// # Errors
    /// When the file cannot be read on: a broken disk, a compressed stream that is cut off.
    pub(crate) fn next(&mut self) -> io::Result<Option<Raw>> {
        match &mut self.form {
            Form::Lines(text) => text.next_line(),
            Form::Array(text) => text.next_element(),
            Form::Table { rows, number, bytes_per_row } => {
                *number += 1;
                self.bytes_read.store((*number as f64 * *bytes_per_row) as u64, Ordering::Relaxed);
                let row = rows.next().transpose().map_err(invalid)?;
                Ok(row.map(|row| Raw { line: *number, text: row.to_json_value().to_string().into_bytes(), fault: None }))
            }
        }
    }

    /// How much of the file has been read, in bytes.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }
}

fn invalid(error: impl ToString) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}

/// The first bytes, left where they are.
fn peek(from: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let start = from.fill_buf()?;
    Ok(start[..start.len().min(4)].to_vec())
}

impl Text {
    /// Whether a list of rows begins here, `[` and then `{` or `]`; if so, goes behind its bracket. A line such as `[1]` is a bad row of JSON
    /// Lines instead.
    fn opens_array(&mut self) -> io::Result<bool> {
        let buffer = self.from.fill_buf()?;
        let mut significant = buffer.iter().enumerate().filter(|(_, byte)| !byte.is_ascii_whitespace());
        let Some((at, b'[')) = significant.next() else { return Ok(false) };
        let opens = matches!(significant.next(), Some((_, b'{' | b']')) | None);
        if opens {
            self.line += buffer[..at].iter().filter(|&&byte| byte == b'\n').count();
            self.from.consume(at + 1);
        }
        Ok(opens)
    }

    fn next_line(&mut self) -> io::Result<Option<Raw>> {
        loop {
            let line = self.line;
            let mut row = Row::default();
            let mut found = false;
            loop {
                let buffer = self.from.fill_buf()?;
                if buffer.is_empty() {
                    break;
                }
                found = true;
                let end = buffer.iter().position(|&byte| byte == b'\n');
                row.push(&buffer[..end.unwrap_or(buffer.len())]);
                let used = end.map_or(buffer.len(), |end| end + 1);
                self.from.consume(used);
                if end.is_some() {
                    self.line += 1;
                    break;
                }
            }
            if !found {
                return Ok(None);
            }
            if let Some(raw) = row.finish(line) {
                return Ok(Some(raw));
            }
        }
    }

    /// What stands up to the next comma or closing bracket that belongs to the array itself.
    fn next_element(&mut self) -> io::Result<Option<Raw>> {
        let (mut row, mut line) = (Row::default(), self.line);
        let (mut depth, mut in_string, mut escaped, mut begun) = (0_usize, false, false, false);
        loop {
            let buffer = self.from.fill_buf()?;
            if buffer.is_empty() {
                let ended = std::mem::replace(&mut self.ended, true);
                return Ok(match (row.finish(line), ended) {
                    (Some(rest), true) => Some(Raw { fault: Some("it stands behind the end of the array".to_owned()), ..rest }),
                    (Some(cut), false) => {
                        Some(Raw { fault: Some("the file ends within this row; it seems cut off".to_owned()), ..cut })
                    }
                    (None, true) => None,
                    (None, false) => {
                        let fault = Some("the file ends before its array does; it seems cut off".to_owned());
                        Some(Raw { line, text: Vec::new(), fault })
                    }
                });
            }
            let mut used = 0;
            let mut separated = false;
            for &byte in buffer {
                used += 1;
                if byte == b'\n' {
                    self.line += 1;
                }
                if !begun && !byte.is_ascii_whitespace() {
                    (begun, line) = (true, self.line);
                }
                if in_string {
                    (in_string, escaped) = (escaped || byte != b'"', !escaped && byte == b'\\');
                    continue;
                }
                match byte {
                    b'"' => in_string = true,
                    b'{' | b'[' => depth += 1,
                    b']' if depth == 0 && !self.ended => {
                        self.ended = true;
                        separated = true;
                    }
                    b'}' | b']' => depth = depth.saturating_sub(1),
                    b',' if depth == 0 && !self.ended => separated = true,
                    _ => {}
                }
                if separated {
                    break;
                }
            }
            row.push(&buffer[..used - usize::from(separated)]);
            self.from.consume(used);
            if separated && let Some(raw) = std::mem::take(&mut row).finish(line) {
                return Ok(Some(raw));
            }
            if separated {
                begun = false;
            }
        }
    }
}

/// A row while it is put together.
#[derive(Default)]
struct Row {
    text: Vec<u8>,
    length: usize,
}

impl Row {
    fn push(&mut self, bytes: &[u8]) {
        self.length += bytes.len();
        if self.length <= LONGEST_ROW {
            self.text.extend_from_slice(bytes);
        } else {
            self.text.truncate(SHOWN);
            self.text.shrink_to_fit();
        }
    }

    /// The row without the white space around it; `None` of a blank one.
    fn finish(self, line: usize) -> Option<Raw> {
        let fault = (self.length > LONGEST_ROW)
            .then(|| format!("it has {:.1} MB; rows of up to {} MB can be read", self.length as f64 / 1e6, LONGEST_ROW >> 20));
        let text = self.text.trim_ascii().to_vec();
        (!text.is_empty() || fault.is_some()).then_some(Raw { line, text, fault })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Write;

    use super::*;

    fn rows(bytes: &[u8]) -> Vec<(usize, String, Option<String>)> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        let mut reader = Reader::open(file.path()).unwrap();
        let mut rows = Vec::new();
        while let Some(raw) = reader.next().unwrap() {
            rows.push((raw.line, String::from_utf8_lossy(&raw.text).into_owned(), raw.fault));
        }
        rows
    }

    fn texts(bytes: &[u8]) -> Vec<String> {
        rows(bytes).into_iter().map(|(_, text, fault)| fault.map_or(text.clone(), |fault| format!("{text}!{fault}"))).collect()
    }

    #[test]
    fn lines_and_arrays_are_told_apart_and_rows_keep_their_lines() {
        let lines = "{\"a\": 1}\r\n\n  {\"a\": 2}\t\n{\"a\": 3}";
        let expected = [(1, "{\"a\": 1}"), (3, "{\"a\": 2}"), (4, "{\"a\": 3}")];
        let found = rows(lines.as_bytes());
        assert_eq!(found.iter().map(|(line, text, _)| (*line, text.as_str())).collect::<Vec<_>>(), expected);

        let array = "\n [\n {\"a\": \"]},{\\\"\\\\\",\n \"b\": [1, {\"c\": 2}]}\n,{}, 5 ,\n\"x,]\" ] \n";
        let expected = [(3, "{\"a\": \"]},{\\\"\\\\\",\n \"b\": [1, {\"c\": 2}]}"), (5, "{}"), (5, "5"), (6, "\"x,]\"")];
        let found = rows(array.as_bytes());
        assert_eq!(found.iter().map(|(line, text, _)| (*line, text.as_str())).collect::<Vec<_>>(), expected);

        assert_eq!(texts(b"[1]\n{\"a\": 1}"), ["[1]", "{\"a\": 1}"], "a bad row of JSON Lines");
        for nothing in ["", "\n \r\n", "[]", "[ \n ]\n", "\u{feff}"] {
            assert!(texts(nothing.as_bytes()).is_empty(), "{nothing:?}");
        }
        assert_eq!(texts("\u{feff}[{}]".as_bytes()), ["{}"]);
        assert_eq!(texts("\u{feff}{}".as_bytes()), ["{}"]);
    }

    #[test]
    fn an_array_that_is_cut_off_or_followed_by_something_says_so() {
        assert_eq!(texts(b"[{\"a\": 1}, {\"a\": "), ["{\"a\": 1}", "{\"a\":!the file ends within this row; it seems cut off"]);
        assert_eq!(texts(b"[{\"a\": 1},"), ["{\"a\": 1}", "!the file ends before its array does; it seems cut off"]);
        assert_eq!(texts(b"[{}]\n{\"b\": 2}"), ["{}", "{\"b\": 2}!it stands behind the end of the array"]);
        assert_eq!(texts(b"[{},,{}]"), ["{}", "{}"], "an empty place is no row");
    }

    #[test]
    fn a_row_that_is_too_long_is_skipped_and_shown_in_part() {
        let long = [b"{\"a\": \"".as_slice(), &vec![b'x'; LONGEST_ROW], b"\"}"].concat();
        for (before, between, after) in [("", "\n", "\n"), ("[", ",", "]")] {
            let text = [before.as_bytes(), b"{}", between.as_bytes(), &long, between.as_bytes(), b"{\"b\": 2}", after.as_bytes()]
                .concat();
            let found = rows(&text);
            assert_eq!((found.len(), found[0].1.as_str(), found[2].1.as_str()), (3, "{}", "{\"b\": 2}"));
            assert!(found[1].1.len() <= SHOWN && found[1].1.starts_with("{\"a\": \"xxx"));
            assert_eq!(found[1].2.as_deref(), Some("it has 67.1 MB; rows of up to 64 MB can be read"));
        }
    }

    #[test]
    fn compressed_files_are_read_whatever_they_are_called_and_cut_ones_are_errors() {
        let plain = b"{\"a\": 1}\n{\"a\": 2}\n";
        let gzip = |bytes: &[u8]| {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        };
        let zstd = |bytes: &[u8]| zstd::encode_all(bytes, 3).unwrap();
        // Several streams in one file, as `cat` and parallel tools make them.
        let packed = [
            gzip(plain),
            zstd(plain),
            [gzip(&plain[..9]), gzip(&plain[9..])].concat(),
            [zstd(&plain[..9]), zstd(&plain[9..])].concat(),
        ];
        for bytes in &packed {
            assert_eq!(texts(bytes), ["{\"a\": 1}", "{\"a\": 2}"]);
        }
        assert_eq!(texts(&gzip(b"[{\"a\": 1}]")), ["{\"a\": 1}"]);
        for bytes in [gzip(plain), zstd(plain)] {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), &bytes[..bytes.len() - 6]).unwrap();
            let read = || -> io::Result<usize> {
                let mut reader = Reader::open(file.path())?;
                let mut count = 0;
                while reader.next()?.is_some() {
                    count += 1;
                }
                Ok(count)
            };
            assert!(read().is_err(), "{:?}", read());
        }
    }

    #[test]
    fn a_row_of_parquet_reads_as_its_json() {
        use arrow_array::builder::{ListBuilder, StringBuilder, StructBuilder};
        use arrow_array::{ArrayRef, Int64Array, RecordBatch, StringArray};
        use arrow_schema::{DataType, Field, Fields};
        use parquet::arrow::ArrowWriter;
        use std::sync::Arc;

        let fields = Fields::from(vec![Field::new("role", DataType::Utf8, true), Field::new("content", DataType::Utf8, true)]);
        let texts = || Box::new(StringBuilder::new()) as Box<dyn arrow_array::builder::ArrayBuilder>;
        let mut lists = ListBuilder::new(StructBuilder::new(fields, vec![texts(), texts()]));
        for chat in [&[("user", "one"), ("assistant", "ä\n")][..], &[], &[("user", "two")]] {
            for (role, content) in chat {
                let message = lists.values();
                message.field_builder::<StringBuilder>(0).unwrap().append_value(role);
                message.field_builder::<StringBuilder>(1).unwrap().append_value(content);
                message.append(true);
            }
            lists.append(!chat.is_empty());
        }
        let columns: [(&str, ArrayRef); 3] = [
            ("id", Arc::new(Int64Array::from(vec![Some(7), None, Some(-1)]))),
            ("messages", Arc::new(lists.finish())),
            ("prompt", Arc::new(StringArray::from(vec![None, Some("p"), None]))),
        ];
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let mut bytes = Vec::new();
        let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        let expected = [
            r#"{"id":7,"messages":[{"role":"user","content":"one"},{"role":"assistant","content":"ä\n"}],"prompt":null}"#,
            r#"{"id":null,"messages":null,"prompt":"p"}"#,
            r#"{"id":-1,"messages":[{"role":"user","content":"two"}],"prompt":null}"#,
        ];
        assert_eq!(self::texts(&bytes), expected);
        assert_eq!(rows(&bytes).iter().map(|row| row.0).collect::<Vec<_>>(), [1, 2, 3]);
        // Cut off, its footer is gone.
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &bytes[..bytes.len() - 9]).unwrap();
        assert!(Reader::open(file.path()).is_err());
    }

    #[test]
    fn other_encodings_are_named() {
        for bytes in [[0xff, 0xfe, b'{', 0], [0xfe, 0xff, 0, b'{']] {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), bytes).unwrap();
            let error = Reader::open(file.path()).err().unwrap().to_string();
            assert!(error.contains("UTF-16") && error.contains("iconv"), "{error}");
        }
    }
}
