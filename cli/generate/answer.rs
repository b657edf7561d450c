//! An answer as it grows: its text goes to the screen, and what became of its rounds is counted for the end.

use std::io::Write;
use std::time::Instant;

use data::responses::FinishReason;
use data::tokenizer::{TextStream, Tokenizer};
use evaluator::Event;
use evaluator::rounds::{Round, tally};

use super::screen::{Mark, Origin, Screen, is_miss};

/// One text under way.
pub(super) struct Answer<'t, W> {
    stream: TextStream<'t>,
    screen: Screen<W>,
    begun: Instant,
    /// Until the first token was known.
    prompt_seconds: f64,
    /// Tokens by how they came.
    counts: [usize; 4],
    rounds: Vec<Round>,
    /// Set when the text has ended by itself.
    finish: Option<FinishReason>,
}

impl<'t, W: Write> Answer<'t, W> {
    /// From now on.
    pub(super) fn begin(tokenizer: &'t Tokenizer, screen: Screen<W>) -> Self {
        Self {
            stream: TextStream::new(tokenizer, true),
            screen,
            begun: Instant::now(),
            prompt_seconds: 0.0,
            counts: [0; 4],
            rounds: Vec::new(),
            finish: None,
        }
    }

    /// Shows what a decoder tells.
    pub(super) fn take(&mut self, event: &Event<'_>) -> anyhow::Result<()> {
        // Neighbours of one look are written together: a character may be put together from several tokens' code points, and a change
        // of looks between them would take it apart.
        let mut pieces: Vec<(Mark, String)> = Vec::new();
        match event {
            Event::Tokens { tokens, round, .. } => {
                if round.is_none() {
                    self.prompt_seconds = self.begun.elapsed().as_secs_f64();
                }
                for (index, &token) in tokens.iter().enumerate() {
                    let mark = Mark::of(*round, index);
                    self.counts[mark.origin as usize] += 1;
                    let text = self.stream.push(token)?;
                    match pieces.last_mut() {
                        Some((last, piece)) if *last == mark => piece.push_str(&text),
                        _ => pieces.push((mark, text)),
                    }
                }
                self.rounds.extend(round.cloned());
            }
            Event::Text(text) => {
                self.finish = Some(text.finish);
                pieces.push((Mark::PLAIN, self.stream.rest()?));
            }
        }
        Ok(self.screen.write(&pieces)?)
    }

    /// Whether the text ended by itself.
    pub(super) fn is_finished(&self) -> bool {
        self.finish.is_some()
    }

    /// Ends what is shown, and gives the figures and the key to the colours, painted where `painted`.
    pub(super) fn end(mut self, painted: bool) -> anyhow::Result<Vec<String>> {
        self.screen.end()?;
        let drafted = self.rounds.iter().any(|round| round.drafted > 0);
        Ok(std::iter::once(self.figures(drafted)).chain(drafted.then(|| self.key(painted))).collect())
    }

    fn figures(&self, drafted: bool) -> String {
        let tally = tally(&self.rounds);
        let mut words = vec![format!("{} tokens", self.counts.iter().sum::<usize>())];
        if drafted {
            words.push(format!("{} rounds, τ {:.2}", tally.rounds, tally.tau_pooled));
        }
        if let Some(hit_rate) = tally.hit_rate {
            let missed: usize = tally.misses.values().sum();
            words.push(format!("hit rate {hit_rate:.2} ({missed} missed)"));
        }
        if let Some(last) = self.rounds.last() {
            let seconds = last.verify_start + last.verify_seconds;
            words.push(format!("{:.1} tokens/s", tally.committed as f64 / seconds.max(1e-9)));
        }
        words.push(format!("the prompt took {:.2} s", self.prompt_seconds));
        words.push(
            match self.finish {
                Some(FinishReason::Stop) => "ended by itself",
                Some(FinishReason::Length) => "ended at the limit",
                None => "interrupted",
            }
            .to_string(),
        );
        words.join(", ")
    }

    /// How often tokens came in which way, and how that is shown.
    fn key(&self, painted: bool) -> String {
        let colours = self.screen.looks.colours;
        let word = |word: &str, mark: Mark| if painted { mark.paint(word) } else { word.to_string() };
        let origin = |name: &str, origin: Origin, colour: &str| {
            let name = word(name, Mark { origin, missed: false });
            let colour = if colours { format!(" ({colour})") } else { String::new() };
            format!("{name} {}{colour}", self.counts[origin as usize])
        };
        let mut words = vec![
            origin("accepted", Origin::Accepted, "green"),
            origin("corrections", Origin::Correction, "red"),
            origin("bonus", Origin::Bonus, "cyan"),
        ];
        if colours && self.rounds.iter().any(is_miss) {
            words.push(format!("{}: the draft was not ready", word("underlined", Mark { origin: Origin::Alone, missed: true })));
        }
        words.join(", ")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::generate::screen::Looks;
    use data::gguf::GgufFile;
    use evaluator::Decoded;
    use evaluator::fan_out::Lookup;
    use std::path::Path;

    fn tokenizer() -> Tokenizer {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(".models/SmolLM2-135M-Instruct.Q4_1.gguf");
        Tokenizer::from_gguf(&GgufFile::open(&path).expect("run `make setup` first")).unwrap()
    }

    fn round(drafted: usize, accepted: usize, lookup: Lookup, end: f64) -> Round {
        let (committed, lookup) = (accepted + 1, Some(lookup));
        Round { drafted, accepted, committed, lookup, verify_start: end - 0.5, verify_seconds: 0.5, ..Round::default() }
    }

    #[test]
    fn an_answer_is_shown_and_counted_round_by_round() {
        let tokenizer = tokenizer();
        let tokens = tokenizer.encode("one two three four five six", false).unwrap();
        assert_eq!(tokens.len(), 6);
        let mut shown = Vec::new();
        let mut answer = Answer::begin(&tokenizer, Screen::new(&mut shown, Looks { terminal: true, colours: true }));
        let rounds = [round(3, 1, Lookup::First, 1.0), round(3, 0, Lookup::WrongCandidate, 1.5), round(1, 1, Lookup::Hit, 2.0)];
        answer.take(&Event::Tokens { prompt: 0, tokens: &tokens[..1], round: None }).unwrap();
        answer.take(&Event::Tokens { prompt: 0, tokens: &tokens[1..3], round: Some(&rounds[0]) }).unwrap();
        answer.take(&Event::Tokens { prompt: 0, tokens: &tokens[3..4], round: Some(&rounds[1]) }).unwrap();
        answer.take(&Event::Tokens { prompt: 0, tokens: &tokens[4..6], round: Some(&rounds[2]) }).unwrap();
        let text = Decoded {
            prompt: 0,
            tokens,
            finish: FinishReason::Length,
            rounds: rounds.to_vec(),
            prefill_seconds: 0.0,
            decode_seconds: 2.0,
        };
        answer.take(&Event::Text(text)).unwrap();
        assert!(answer.is_finished());
        let end = answer.end(false).unwrap();
        let text = "one\x1b[32m two\x1b[0m\x1b[31m three\x1b[0m\x1b[31;4m four\x1b[0m\x1b[32m five\x1b[0m\x1b[36m six\x1b[0m\n";
        assert_eq!(String::from_utf8(shown).unwrap(), text);
        let figures = "6 tokens, 3 rounds, τ 1.67, hit rate 0.50 (1 missed), 2.5 tokens/s, the prompt took ";
        assert!(end[0].starts_with(figures) && end[0].ends_with(" s, ended at the limit"), "{}", end[0]);
        assert_eq!(end[1..], ["accepted 2 (green), corrections 2 (red), bonus 1 (cyan), underlined: the draft was not ready"]);
    }

    #[test]
    fn without_drafts_there_is_nothing_to_explain() {
        let tokenizer = tokenizer();
        let tokens = tokenizer.encode("one two", false).unwrap();
        let mut answer = Answer::begin(&tokenizer, Screen::new(Vec::new(), Looks { terminal: false, colours: false }));
        let alone = Round { committed: 1, verify_seconds: 0.5, ..Round::default() };
        answer.take(&Event::Tokens { prompt: 0, tokens: &tokens[..1], round: None }).unwrap();
        answer.take(&Event::Tokens { prompt: 0, tokens: &tokens[1..], round: Some(&alone) }).unwrap();
        assert!(!answer.is_finished());
        let end = answer.end(false).unwrap();
        assert_eq!(end.len(), 1);
        assert!(end[0].starts_with("2 tokens, 2.0 tokens/s") && end[0].ends_with("interrupted"), "{}", end[0]);
    }
}
