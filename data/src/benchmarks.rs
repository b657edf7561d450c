//! Benchmarks: prompt files read for the sake of being answered turn by turn. Where a set's rows have fields of their own, a form says
//! what the target is asked; rows in a dialect of prompt files are taken as they are.

use crate::prompts::row::{self, Row, identifier, texts, user};
use crate::prompts::{PromptError, Rejected, Request, UniqueIds, content_hash, read_rows, request};
use serde_json::{Map, Value};
use std::path::Path;

/// What the target is asked, in terms of a set's own fields.
#[derive(Debug, Clone, Copy)]
pub enum Form<'a> {
    /// One user turn: the first of these templates that the row has all fields for, as texts that are not blank. `{field}` stands for a
    /// field's text, and every other brace for itself.
    Templates(&'a [String]),
    /// The user turns are the texts in the list under this field.
    Turns(&'a str),
}

/// A conversation whose user turns are known and whose answers are not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conversation {
    /// Up to the first turn that is to be answered.
    pub request: Request,
    /// What the user says after each answer but the last.
    pub later_turns: Vec<String>,
    /// Empty where the row has none.
    pub category: String,
}

/// All rows of a benchmark's file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Benchmark {
    /// In the file's order.
    pub conversations: Vec<Conversation>,
    pub rejected: Vec<Rejected>,
    /// Lines that were not blank; equals `conversations.len() + rejected.len()`.
    pub rows_read: usize,
}

/// Reads a file of JSON Lines.
///
/// A row is a chat (`messages` or `conversations`, read as [`crate::preparation::prepare`] does, answers within it included), a conversation
/// whose answers are still to come (`turns`, a list of user texts), else a row with the fields that `form` asks for, else in one of the
/// other dialects of prompt files. Its category is what it has under `category_field`, else under `category`: a text or a
/// number. Ids are given as there; without one of its own a conversation's is a hash of all its turns.
///
/// # Errors
/// When the file cannot be read, has no rows, or has no row that can be used. A row that cannot be used is no error while others can:
/// it is in [`Benchmark::rejected`].
pub fn read(path: &Path, form: Option<Form<'_>>, category_field: Option<&str>) -> Result<Benchmark, PromptError> {
    let rows = read_rows(path, |line| parse(line, form, category_field))?;
    let rows_read = rows.used.len() + rows.rejected.len();
    let conversation = |(line, (row, later_turns, category)): (usize, (Row, Vec<String>, String))| {
        let later: Vec<_> = later_turns.iter().cloned().map(user).collect();
        let id = row.id.clone().unwrap_or_else(|| content_hash(row.messages.iter().chain(&later), row.tools.as_ref()));
        Conversation { request: request(path, line, id, row), later_turns, category }
    };
    let mut conversations: Vec<Conversation> = rows.used.into_iter().map(conversation).collect();
    let mut ids = UniqueIds::default();
    for Conversation { request, .. } in &mut conversations {
        request.id = ids.make(std::mem::take(&mut request.id), "");
    }
    Ok(Benchmark { conversations, rejected: rows.rejected, rows_read })
}

/// A line to its row, the turns after the first, and its category.
fn parse(line: &[u8], form: Option<Form<'_>>, category_field: Option<&str>) -> Result<(Row, Vec<String>, String), String> {
    let fields = row::fields(line)?;
    let named = category_field.into_iter().chain(["category"]).find_map(|name| identifier(fields.get(name)?));
    let category = named.unwrap_or_default();
    match user_turns(&fields, form)? {
        Some(mut turns) => {
            let later = turns.split_off(turns.len().min(1));
            let row = row::with_messages(&fields, turns.into_iter().map(user).collect())?;
            Ok((row, later, category))
        }
        None => Ok((row::with_messages(&fields, row::messages(&fields)?)?, Vec::new(), category)),
    }
}

/// The user turns of a row that is no chat and not in one of the dialects with one text, which are `None`.
fn user_turns(fields: &Map<String, Value>, form: Option<Form<'_>>) -> Result<Option<Vec<String>>, String> {
    let present = |name: &str| fields.get(name).filter(|value| !value.is_null());
    if present("messages").or(present("conversations")).is_some() {
        return Ok(None);
    }
    if let Some(turns) = present("turns") {
        return texts("turns", turns).map(Some);
    }
    let own = match form {
        None => return Ok(None),
        Some(Form::Templates(templates)) => {
            let text = |name: &str| present(name)?.as_str().filter(|text| !text.trim().is_empty());
            templates.iter().find_map(|template| fill(template, text)).map(|text| vec![text])
        }
        // A list of messages is a chat, not turns.
        Some(Form::Turns(name)) => match present(name) {
            Some(value @ Value::Array(list)) if list.iter().all(Value::is_string) => Some(texts(name, value)?),
            _ => None,
        },
    };
    match form {
        Some(form) if own.is_none() && row::PROMPT_FIELDS.into_iter().all(|name| present(name).is_none()) => Err(format!(
            "neither {}, which the set's own rows have, nor a prompt field; one of `{}` is needed",
            own_fields(form),
            row::PROMPT_FIELDS.join("`, `")
        )),
        _ => Ok(own),
    }
}

/// The template with every `{field}` replaced, or nothing when one is absent.
fn fill<'f>(template: &str, field: impl Fn(&str) -> Option<&'f str>) -> Option<String> {
    let mut text = String::new();
    let mut rest = template;
    while let Some(start) = rest.find('{') {
        text.push_str(&rest[..start]);
        rest = &rest[start + 1..];
        match field_name(rest) {
            Some(name) => {
                text.push_str(field(name)?);
                rest = &rest[name.len() + 1..];
            }
            None => text.push('{'),
        }
    }
    text.push_str(rest);
    Some(text)
}

/// The name that a brace has just opened and one closes.
fn field_name(rest: &str) -> Option<&str> {
    let (name, _) = rest.split_once('}')?;
    let is_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    is_name.then_some(name)
}

/// The fields that a form needs at least, for messages.
fn own_fields(form: Form<'_>) -> String {
    let names = match form {
        Form::Turns(name) => vec![name],
        // The last template is the one for rows with the fewest fields.
        Form::Templates(templates) => {
            templates.last().into_iter().flat_map(|last| last.split('{').filter_map(field_name)).collect()
        }
    };
    format!("`{}`", names.join("`, `"))
}

#[cfg(test)]
mod tests;
