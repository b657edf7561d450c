//! Prompt rows made by a small generator: of all dialects, as long as people's are, the same each time.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::json;

/// What a linear congruential generator draws is random enough for words, and repeats.
struct Draws(u64);

impl Draws {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    /// A text as long as people's prompts are: some of them ten times as long as most.
    fn text(&mut self) -> String {
        const WORDS: [&str; 24] = [
            "how",
            "many",
            "apples",
            "does",
            "the",
            "neighbour",
            "carry",
            "when",
            "Wednesday",
            "rain,",
            "function",
            "returns",
            "größer",
            "über",
            "解释",
            "この",
            "0.25",
            "({x:",
            "reservoir",
            "equals",
            "because",
            "\"quoted\"",
            "😀",
            "antidisestablishmentarianism",
        ];
        let words = (30 + self.below(140)) * if self.below(50) == 0 { 10 } else { 1 };
        let word = |_| match self.below(9) {
            0 => self.below(100_000).to_string(),
            _ => WORDS[self.below(WORDS.len() as u64) as usize].to_owned(),
        };
        (0..words).map(word).collect::<Vec<_>>().join(" ")
    }
}

/// Rows of all dialects as JSON Lines; every 97th cannot be used, and some ids are there twice.
pub(crate) fn write_rows(path: &Path, rows: usize) {
    let mut file = BufWriter::new(File::create(path).unwrap());
    let mut draws = Draws(rows as u64);
    for number in 0..rows {
        let text = draws.text();
        let row = match number % 7 {
            _ if number % 97 == 96 => json!({ "comment": text }),
            0 => json!({ "id": number, "messages": [{ "role": "user", "content": text }] }),
            1 => {
                json!({ "id": number / 3, "conversations": [{ "from": "human", "value": text }, { "from": "gpt", "value": draws.text() }] })
            }
            2 => json!({ "prompt": text }),
            3 => json!({ "instruction": "Translate this.", "input": text }),
            4 => json!({ "question_id": number, "turns": [text, draws.text()] }),
            5 => json!({ "text": text, "other": [1, 2, 3] }),
            _ => json!({ "question": text, "answer": draws.text() }),
        };
        writeln!(file, "{row}").unwrap();
    }
    file.flush().unwrap();
}
