//! Chat templates: messages to the text the target was trained on. Templates are Jinja programs written for Python, so
//! this is the Jinja of `transformers`: its functions, its `tojson`, its white-space rules and Python's text methods.

mod python_json;

use crate::files::sha256_hex;
use crate::gguf::GgufFile;
use crate::prompts::Message;
use crate::tokenizer::SpecialTokens;
use chrono::{DateTime, NaiveDate, NaiveTime, Utc};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, context, escape_formatter};
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The key of a GGUF file's metadata that holds its chat template.
const GGUF_KEY: &str = "tokenizer.chat_template";

/// Enough for some ten thousand messages; a template that loops without end stops within a second or so.
const FUEL: u64 = 20_000_000;

/// The name a template has in messages of the template engine. It has no extension, which would turn on escaping.
const NAME: &str = "chat_template";

/// Why a chat template cannot be found, understood or rendered.
#[derive(Debug, Error)]
pub enum ChatError {
    #[error("cannot read `{}`: {reason}", path.display())]
    Read { path: PathBuf, reason: String },
    #[error("`{}` has no chat template; a model tuned for chat is needed", .0.display())]
    Absent(PathBuf),
    #[error("the chat template is not valid: {0}")]
    Syntax(String),
    #[error("the chat template refuses these messages: {0}")]
    Refused(String),
    #[error("the chat template did not end within its allowance of {FUEL} steps")]
    Endless,
    #[error("the chat template fails on these messages: {0}")]
    Render(String),
    #[error("`{0}` is not a date for the chat template; write it as in `2026-01-31`")]
    Date(String),
}

/// A compiled chat template with the special tokens it may name.
#[derive(Debug)]
pub struct ChatTemplate {
    source: String,
    special: SpecialTokens,
    date: NaiveDate,
    environment: Environment<'static>,
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// When it is not valid Jinja, or uses a tag that is not supported; the message has the line.
    pub fn new(source: String, special: &SpecialTokens) -> Result<ChatTemplate, ChatError> {
        let date = chrono::Local::now().date_naive();
        let mut environment = environment(date).map_err(|error| ChatError::Syntax(describe(&error)))?;
        let without_tags = replace_generation_tags(&source);
        environment.add_template_owned(NAME, without_tags).map_err(|error| ChatError::Syntax(describe(&error)))?;
        Ok(ChatTemplate { source, special: special.clone(), date, environment })
    }

    /// The same template as if it were run on `date`, written as `2026-01-31`. Some templates put the date into the prompt, and a run
    /// that is resumed on another day must give the same prompts as before.
    ///
    /// # Errors
    /// When `date` is not a date in this form.
    pub fn with_date(mut self, date: &str) -> Result<ChatTemplate, ChatError> {
        self.date = date.parse().map_err(|_| ChatError::Date(date.to_owned()))?;
        self.environment.add_function("strftime_now", strftime_now(self.date));
        Ok(self)
    }

    /// The date that the template sees, in the form that [`ChatTemplate::with_date`] takes: the day on which the template was read,
    /// unless set.
    pub fn date(&self) -> String {
        self.date.to_string()
    }

    /// The template in a GGUF file's metadata.
    ///
    /// # Errors
    /// When there is none, or [`ChatTemplate::new`] refuses it.
    pub fn from_gguf(gguf: &GgufFile) -> Result<ChatTemplate, ChatError> {
        let source = gguf.string(GGUF_KEY).map_err(|_| ChatError::Absent(gguf.path.clone()))?;
        ChatTemplate::new(source.to_owned(), &SpecialTokens::from_gguf(gguf))
    }

    /// The template of a model folder: `chat_template.jinja`, else the `chat_template` of `tokenizer_config.json`, of
    /// whose named templates the one named `default` is meant.
    ///
    /// # Errors
    /// When there is none, a file cannot be read, or [`ChatTemplate::new`] refuses it.
    pub fn from_folder(folder: &Path) -> Result<ChatTemplate, ChatError> {
        let configuration_path = folder.join("tokenizer_config.json");
        let configuration_error = |reason: String| ChatError::Read { path: configuration_path.clone(), reason };
        let special = SpecialTokens::from_configuration(&configuration_path);
        let special = special.map_err(|error| configuration_error(error.to_string()))?;
        let path = folder.join("chat_template.jinja");
        match fs::read_to_string(&path) {
            Ok(source) => return ChatTemplate::new(source, &special),
            Err(error) if error.kind() == io::ErrorKind::NotFound => (),
            Err(error) => return Err(ChatError::Read { path, reason: error.to_string() }),
        }
        let text = fs::read_to_string(&configuration_path).map_err(|error| configuration_error(error.to_string()))?;
        let configuration: Json = serde_json::from_str(&text).map_err(|error| configuration_error(error.to_string()))?;
        let source = match configuration.get("chat_template") {
            Some(Json::String(source)) => Some(source.as_str()),
            Some(Json::Array(named)) => {
                let default = named.iter().find(|template| template.get("name").and_then(Json::as_str) == Some("default"));
                default.and_then(|template| template.get("template")?.as_str())
            }
            _ => None,
        };
        ChatTemplate::new(source.ok_or_else(|| ChatError::Absent(folder.into()))?.to_owned(), &special)
    }

    /// Renders messages. `add_generation_prompt` opens the assistant's answer; `thinking`, where given, is the template's
    /// `enable_thinking`.
    ///
    /// # Errors
    /// When the template refuses the messages, fails on them, or does not end.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool, thinking: Option<bool>) -> Result<String, ChatError> {
        self.render_with_tools(messages, None, add_generation_prompt, thinking)
    }

    /// The same for a target that may call tools, a list in the form that its template knows.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn render_with_tools(
        &self,
        messages: &[Message],
        tools: Option<&Json>,
        add_generation_prompt: bool,
        thinking: Option<bool>,
    ) -> Result<String, ChatError> {
        let switches = thinking.map(|thinking| ("enable_thinking", Value::from(thinking)));
        let tokens = self.special.named().map(|(name, token)| (name, Value::from(token)));
        let optional: BTreeMap<&str, Value> = tokens.chain(switches).collect();
        // Tools and documents are given as none, not left undefined, because templates test for both.
        let tools = tools.map_or(Value::from(()), |tools| Value::from(Serde(tools)));
        let context =
            context! { messages => Serde(messages), add_generation_prompt, tools, documents => (), ..Value::from(optional) };
        let template = self.environment.get_template(NAME).map_err(|error| ChatError::Syntax(describe(&error)))?;
        template.render(context).map_err(|error| match error.kind() {
            ErrorKind::OutOfFuel => ChatError::Endless,
            _ => match refusal(&error) {
                Some(reason) => ChatError::Refused(reason.to_owned()),
                None => ChatError::Render(describe(&error)),
            },
        })
    }

    /// The template as it was given.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// SHA-256 of the template's text, in hexadecimal.
    pub fn hash(&self) -> String {
        sha256_hex(&self.source)
    }
}

fn environment(date: NaiveDate) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_fuel(Some(FUEL));
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now(date));
    // Python writes its constants with capitals.
    environment.set_formatter(|out, state, value| match value.kind() {
        ValueKind::None => Ok(out.write_str("None")?),
        ValueKind::Bool => Ok(out.write_str(if value.is_true() { "True" } else { "False" })?),
        _ => escape_formatter(out, state, value),
    });
    Ok(environment)
}

/// `transformers` marks the assistant's text with these tags to make loss masks. For rendering they are a scope.
fn replace_generation_tags(source: &str) -> String {
    let mut replaced = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        replaced.push_str(before);
        let length = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(length);
        let name = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+']).trim();
        match name {
            "generation" => replaced.push_str(&tag.replacen("generation", "with", 1)),
            "endgeneration" => replaced.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            _ => replaced.push_str(tag),
        }
        rest = after;
    }
    replaced.push_str(rest);
    replaced
}

/// An error that a template raised on purpose carries its reason as a source of this type.
#[derive(Debug, Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(reason: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, reason.clone()).with_source(Raised(reason)))
}

fn refusal(error: &Error) -> Option<&str> {
    let first: &(dyn std::error::Error + 'static) = error;
    let mut chain = std::iter::successors(Some(first), |error| error.source());
    chain.find_map(|error| error.downcast_ref::<Raised>()).map(|raised| raised.0.as_str())
}

/// The function `strftime_now` of templates. Its time of day is always midnight, so that the date alone says what it gives.
fn strftime_now(date: NaiveDate) -> impl Fn(&str) -> Result<String, Error> {
    use std::fmt::Write;
    let midnight: DateTime<Utc> = date.and_time(NaiveTime::MIN).and_utc();
    move |format| {
        let mut text = String::new();
        let written = write!(text, "{}", midnight.format(format));
        written.map_err(|_| Error::new(ErrorKind::InvalidOperation, format!("`{format}` is not a format of strftime")))?;
        Ok(text)
    }
}

fn tojson(value: Value, options: Kwargs) -> Result<String, Error> {
    let layout = python_json::Layout::from_options(&options)?;
    options.assert_all_used()?;
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, "an undefined value has no JSON"));
    }
    let json = serde_json::to_value(&value).map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(layout.write(&json))
}

/// The engine's message with its line, and what caused it.
fn describe(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests;
