//! Text for whoever reads it: coloured by how each token came and safe on a terminal, as it is everywhere else.

use std::io::{self, Write};

use evaluator::fan_out::Lookup;
use evaluator::rounds::Round;

/// How a token came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// From the target, with no draft before it: the first token, and all of autoregressive decoding.
    Alone,
    /// Drafted, and the target agreed.
    Accepted,
    /// The target's, in place of the first drafted token it did not agree with.
    Correction,
    /// The target's, behind a draft that it accepted whole.
    Bonus,
}

/// What a token's looks tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) origin: Origin,
    /// Whether its round's draft could have been ready and was not.
    pub(super) missed: bool,
}

impl Mark {
    pub(super) const PLAIN: Mark = Mark { origin: Origin::Alone, missed: false };

    /// The mark of a token by its place in what a round committed.
    pub(super) fn of(round: Option<&Round>, index: usize) -> Self {
        let Some(round) = round else { return Self::PLAIN };
        let origin = if round.drafted == 0 {
            Origin::Alone
        } else if index < round.accepted {
            Origin::Accepted
        } else if round.accepted < round.drafted {
            Origin::Correction
        } else {
            Origin::Bonus
        };
        Self { origin, missed: is_miss(round) }
    }

    /// The parameters of the terminal's Select Graphic Rendition (ECMA-48, 8.3.117): green, red, cyan; 4 underlines.
    fn rendition(self) -> &'static str {
        match (self.origin, self.missed) {
            (Origin::Alone, false) => "",
            (Origin::Alone, true) => "4",
            (Origin::Accepted, false) => "32",
            (Origin::Accepted, true) => "32;4",
            (Origin::Correction, false) => "31",
            (Origin::Correction, true) => "31;4",
            (Origin::Bonus, false) => "36",
            (Origin::Bonus, true) => "36;4",
        }
    }

    /// A text with these looks, which end with it.
    pub(super) fn paint(self, text: &str) -> String {
        match self.rendition() {
            "" => text.to_owned(),
            rendition => format!("\x1b[{rendition}m{text}\x1b[0m"),
        }
    }
}

/// Whether a draft could have been ready and was not.
pub(super) fn is_miss(round: &Round) -> bool {
    round.lookup.is_some_and(|lookup| !matches!(lookup, Lookup::Hit | Lookup::First))
}

/// How text is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Looks {
    /// Whether control characters are written out, because a terminal would obey them, and the last line is ended.
    pub(super) terminal: bool,
    pub(super) colours: bool,
}

impl Looks {
    /// Colours only on a terminal that has them, unless `NO_COLOR` is set (<https://no-color.org>).
    pub(super) fn choose(terminal: bool, variable: impl Fn(&str) -> Option<String>) -> Self {
        let unwanted = variable("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = variable("TERM").is_some_and(|value| value == "dumb");
        Self { terminal, colours: terminal && !unwanted && !dumb }
    }
}

/// Where the answer goes.
pub(super) struct Screen<W> {
    out: W,
    pub(super) looks: Looks,
    /// Whether the last line is begun and not ended.
    in_line: bool,
}

impl<W: Write> Screen<W> {
    pub(super) fn new(out: W, looks: Looks) -> Self {
        Self { out, looks, in_line: false }
    }

    /// Writes pieces of text at once.
    pub(super) fn write(&mut self, pieces: &[(Mark, String)]) -> io::Result<()> {
        for (mark, text) in pieces.iter().filter(|(_, text)| !text.is_empty()) {
            self.in_line = !text.ends_with('\n');
            let safe = if self.looks.terminal { without_controls(text) } else { text.clone() };
            let painted = if self.looks.colours { mark.paint(&safe) } else { safe };
            self.out.write_all(painted.as_bytes())?;
        }
        self.out.flush()
    }

    /// Ends the text: on a terminal what comes next begins on a line of its own.
    pub(super) fn end(&mut self) -> io::Result<()> {
        if self.looks.terminal && self.in_line {
            self.out.write_all(b"\n")?;
            self.in_line = false;
        }
        self.out.flush()
    }
}

/// A text whose control characters, other than ends of lines and tabs, are written out as in `\u{1b}`.
fn without_controls(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() && !matches!(character, '\n' | '\t') {
            safe.extend(character.escape_default());
        } else {
            safe.push(character);
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn round(drafted: usize, accepted: usize, committed: usize, lookup: Option<Lookup>) -> Round {
        Round { drafted, accepted, committed, lookup, ..Round::default() }
    }

    fn origins(round: &Round) -> Vec<Origin> {
        (0..round.committed).map(|index| Mark::of(Some(round), index).origin).collect()
    }

    #[test]
    fn tokens_are_told_apart_by_how_they_came() {
        use Origin::{Accepted, Alone, Bonus, Correction};
        assert_eq!(origins(&round(3, 1, 2, None)), [Accepted, Correction]);
        assert_eq!(origins(&round(3, 0, 1, None)), [Correction]);
        assert_eq!(origins(&round(2, 2, 3, None)), [Accepted, Accepted, Bonus]);
        // A stop token inside the draft, behind which nothing was judged.
        assert_eq!(origins(&round(2, 2, 2, None)), [Accepted, Accepted]);
        assert_eq!(origins(&round(0, 0, 1, None)), [Alone]);
        assert_eq!(Mark::of(None, 0), Mark::PLAIN);
    }

    #[test]
    fn only_a_draft_that_could_have_been_ready_is_missed() {
        let missed = |lookup| Mark::of(Some(&round(3, 1, 2, lookup)), 0).missed;
        for lookup in Lookup::ALL {
            assert_eq!(missed(Some(lookup)), !matches!(lookup, Lookup::Hit | Lookup::First), "{lookup:?}");
        }
        assert!(!missed(None));
    }

    #[test]
    fn colours_need_a_terminal_that_wants_them() {
        let choose = |terminal, variables: &[(&str, &str)]| {
            let variable = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string());
            let looks = Looks::choose(terminal, variable);
            (looks.terminal, looks.colours)
        };
        assert_eq!(choose(true, &[("TERM", "xterm")]), (true, true));
        assert_eq!(choose(true, &[]), (true, true));
        assert_eq!(choose(true, &[("NO_COLOR", "")]), (true, true));
        assert_eq!(choose(true, &[("NO_COLOR", "1")]), (true, false));
        assert_eq!(choose(true, &[("TERM", "dumb")]), (true, false));
        assert_eq!(choose(false, &[("TERM", "xterm")]), (false, false));
    }

    fn written(looks: Looks, pieces: &[(Mark, &str)]) -> String {
        let mut screen = Screen::new(Vec::new(), looks);
        let pieces: Vec<(Mark, String)> = pieces.iter().map(|(mark, text)| (*mark, text.to_string())).collect();
        screen.write(&pieces).unwrap();
        screen.end().unwrap();
        String::from_utf8(screen.out).unwrap()
    }

    #[test]
    fn each_piece_is_painted_and_the_last_line_ended() {
        let accepted = Mark { origin: Origin::Accepted, missed: false };
        let corrected = Mark { origin: Origin::Correction, missed: true };
        let pieces = [(Mark::PLAIN, "One"), (accepted, ", two"), (corrected, ""), (corrected, " three")];
        let looks = |terminal, colours| Looks { terminal, colours };
        assert_eq!(written(looks(true, true), &pieces), "One\x1b[32m, two\x1b[0m\x1b[31;4m three\x1b[0m\n");
        assert_eq!(written(looks(true, false), &pieces), "One, two three\n");
        assert_eq!(written(looks(false, false), &pieces), "One, two three");
        assert_eq!(written(looks(true, false), &[(accepted, "ended\n"), (accepted, "")]), "ended\n");
        assert_eq!(written(looks(true, false), &[]), "");
    }

    #[test]
    fn control_characters_reach_a_pipe_but_no_terminal() {
        let text = "a\x1b[2J\u{9b}31m\x07\x7f\r\tb\n";
        let pieces = [(Mark { origin: Origin::Bonus, missed: false }, text)];
        let safe = "a\\u{1b}[2J\\u{9b}31m\\u{7}\\u{7f}\\r\tb\n";
        assert_eq!(written(Looks { terminal: true, colours: false }, &pieces), safe);
        assert_eq!(written(Looks { terminal: true, colours: true }, &pieces), format!("\x1b[36m{safe}\x1b[0m"));
        assert_eq!(written(Looks { terminal: false, colours: false }, &pieces), text);
    }
}
