//! Where a value was written: a source is a recipe file or a `--set` override, a place is a span of bytes in it.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// A text that keys were read from.
#[derive(Debug)]
pub(crate) struct Source {
    /// The name that messages show: the path as given, or `--set KEY=VALUE`.
    pub(crate) name: String,
    pub(crate) text: String,
    /// The absolute folder that relative paths in this text start from.
    pub(crate) folder: PathBuf,
    pub(crate) is_override: bool,
}

/// A span of bytes in a source, or all of it; shown as `FILE:LINE:COLUMN` and as the line with carets below it.
#[derive(Debug, Clone)]
pub struct Place {
    pub(crate) source: Arc<Source>,
    pub(crate) span: Option<Range<usize>>,
}

impl Place {
    pub(crate) fn new(source: &Arc<Source>, span: Option<Range<usize>>) -> Self {
        Self { source: source.clone(), span }
    }

    /// `FILE:LINE:COLUMN`, both counted from one in characters; the name alone for an override or a whole file.
    pub(crate) fn head(&self) -> String {
        match &self.span {
            Some(span) if !self.source.is_override => {
                let (line_number, before, _) = self.line(span);
                format!("{}:{line_number}:{}", self.source.name, before.chars().count() + 1)
            }
            _ => self.source.name.clone(),
        }
    }

    /// The source line and a line of carets below the span, each after a line break; empty for a whole file.
    pub(crate) fn excerpt(&self) -> String {
        let Some(span) = &self.span else { return String::new() };
        let (line_number, before, rest) = self.line(span);
        let margin = if self.source.is_override { String::from(" ") } else { line_number.to_string() };
        let blank = " ".repeat(margin.len());
        // Tabs stay tabs, so that the carets stand below the span however wide a tab is.
        let indent: String = before.chars().map(|character| if character == '\t' { '\t' } else { ' ' }).collect();
        let inside = rest.get(..span.len().min(rest.len())).unwrap_or(rest);
        let carets = "^".repeat(inside.trim_end().chars().count().max(1));
        format!("\n{margin} | {before}{rest}\n{blank} | {indent}{carets}")
    }

    /// The text of the span, when it is short enough to stand in a message.
    pub(crate) fn short_text(&self) -> Option<&str> {
        let text = self.source.text.get(self.span.clone()?)?;
        (text.len() <= 60 && !text.contains('\n')).then_some(text)
    }

    /// The number of the line where `span` starts, and that line's text before and from the start on.
    fn line(&self, span: &Range<usize>) -> (usize, &str, &str) {
        let (before, rest) = self.source.text.split_at_checked(span.start).unwrap_or((&self.source.text, ""));
        let line_start = before.rfind('\n').map_or(0, |index| index + 1);
        let rest = rest.split('\n').next().unwrap_or_default().trim_end_matches('\r');
        (before.matches('\n').count() + 1, &before[line_start..], rest)
    }
}
