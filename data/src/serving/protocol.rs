//! The protocol's bodies: what a request says, and what a reply must say to be an answer.

use super::ServingSettings;
use crate::engine::{Answer, Question};
use crate::responses::FinishReason;
use crate::supervision::{counter_generator, purpose};
use rand_chacha::rand_core::RngCore;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// A field of requests that not every server takes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Extra {
    pub(super) name: &'static str,
    pub(super) value: Value,
    /// Whether answers without it would be of other settings.
    pub(super) needed: bool,
}

/// The fields beyond the protocol's own, those that can be left out first.
///
/// Beside what the settings ask for they say that nothing else is to be done to the probabilities: vLLM and SGLang take what a request
/// leaves open from the model's `generation_config.json`, and llama.cpp has defaults of its own. A server that refuses such a field does
/// not know the setting.
pub(super) fn extras(settings: &ServingSettings) -> Vec<Extra> {
    let optional = |name, value| Extra { name, value, needed: false };
    let needed = |name, value| Extra { name, value, needed: true };
    // Token ids: llama.cpp's two names, then the name of vLLM and SGLang.
    let ids = ["verbose", "return_tokens", "return_token_ids"];
    let mut extras: Vec<Extra> = ids.map(|name| optional(name, json!(true))).into();
    extras.extend([optional("repeat_penalty", json!(1.0)), optional("repetition_penalty", json!(1.0))]);
    if settings.temperature > 0.0 {
        extras.push(optional("min_p", json!(0.0)));
        if settings.top_k == 0 {
            extras.push(optional("top_k", json!(-1)));
        }
    }
    if !settings.stop_tokens.is_empty() {
        extras.push(optional("stop_token_ids", json!(settings.stop_tokens)));
    }
    extras.push(needed("chat_template_kwargs", json!({ "enable_thinking": settings.thinking })));
    if settings.top_k > 0 {
        extras.push(needed("top_k", json!(settings.top_k)));
    }
    extras
}

/// The body of the request for an answer of at most `max_tokens`, without the fields named in `left_out`.
pub(super) fn request(
    question: &Question,
    settings: &ServingSettings,
    model: &str,
    max_tokens: u32,
    left_out: &[&'static str],
) -> Vec<u8> {
    let mut body = Map::new();
    let mut set = |name: &str, value| body.insert(name.to_owned(), value);
    set("model", json!(model));
    set("messages", json!(question.messages));
    if let Some(tools) = &question.tools {
        set("tools", tools.clone());
    }
    set("temperature", json!(settings.temperature));
    set("top_p", json!(settings.top_p));
    set("max_tokens", json!(max_tokens));
    set("seed", json!(seed(settings.seed, question.counter)));
    set("stream", json!(false));
    for extra in extras(settings).into_iter().filter(|extra| !left_out.contains(&extra.name)) {
        set(extra.name, extra.value);
    }
    Value::Object(body).to_string().into_bytes()
}

/// 31 bits, which every server can read.
fn seed(seed: u64, counter: u64) -> u32 {
    counter_generator(seed, purpose::SERVER_SEED, counter, 0).next_u32() >> 1
}

/// A reply, as far as it is of interest. What it lacks shows when it is used.
#[derive(Debug, Deserialize)]
pub(super) struct Completion {
    #[serde(default)]
    choices: Option<Vec<Choice>>,
    /// vLLM's place for them.
    #[serde(default)]
    prompt_token_ids: Option<Vec<i64>>,
    #[serde(default)]
    usage: Option<Usage>,
    /// What llama.cpp adds on request, and older versions when started with `--verbose`.
    #[serde(default, rename = "__verbose")]
    verbose: Option<Verbose>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    #[serde(default)]
    message: Option<Said>,
    #[serde(default)]
    finish_reason: Option<String>,
    #[serde(default)]
    token_ids: Option<Vec<i64>>,
    /// SGLang's place for them.
    #[serde(default)]
    prompt_token_ids: Option<Vec<i64>>,
}

#[derive(Debug, Default, Deserialize)]
struct Said {
    #[serde(default)]
    content: Option<String>,
    #[serde(default)]
    reasoning_content: Option<String>,
    #[serde(default)]
    reasoning: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<Value>>,
}

#[derive(Debug, Deserialize)]
struct Usage {
    #[serde(default)]
    prompt_tokens: Option<u64>,
    #[serde(default)]
    completion_tokens: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct Verbose {
    #[serde(default)]
    tokens: Option<Vec<i64>>,
}

/// Why a reply is no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Unusable {
    /// It is what the server has to say to this question.
    Answer(String),
    /// It is not of the protocol.
    Reply(String),
}

/// The reply in this body.
pub(super) fn parse(body: &[u8]) -> Result<Completion, Unusable> {
    let completion: Completion = serde_json::from_slice(body)
        .map_err(|error| Unusable::Reply(format!("its reply is not a chat completion ({error}): {}", message_in(body))))?;
    if completion.choices.as_ref().is_none_or(Vec::is_empty) {
        return Err(Unusable::Reply(format!("its reply has no choices: {}", message_in(body))));
    }
    Ok(completion)
}

impl Completion {
    fn prompt_ids(&self) -> Option<&[i64]> {
        let of_choice = || self.choices.iter().flatten().next().and_then(|choice| choice.prompt_token_ids.as_deref());
        self.prompt_token_ids.as_deref().or_else(of_choice)
    }

    /// Whether the server returns ids of what it generates.
    pub(super) fn has_ids(&self) -> bool {
        let of_choice = self.choices.iter().flatten().next().is_some_and(|choice| choice.token_ids.is_some());
        of_choice || self.verbose_ids().is_some()
    }

    /// Whether the server tells which prompt it saw.
    pub(super) fn has_prompt_ids(&self) -> bool {
        self.prompt_ids().is_some()
    }

    /// llama.cpp lists no ids when it was not asked for them.
    fn verbose_ids(&self) -> Option<&Vec<i64>> {
        self.verbose.as_ref().and_then(|verbose| verbose.tokens.as_ref()).filter(|ids| !ids.is_empty())
    }

    /// How many tokens the server counted in the prompt.
    pub(super) fn counted_prompt(&self) -> Option<u64> {
        self.usage.as_ref().and_then(|usage| usage.prompt_tokens)
    }

    /// How the prompt that the server saw differs from the recorded one, where it tells and it does.
    pub(super) fn prompt_difference(&self, recorded: &[u32]) -> Option<String> {
        let seen = self.prompt_ids()?;
        let same = |(seen, recorded): (&i64, &u32)| *seen == i64::from(*recorded);
        let position = seen.iter().zip(recorded).position(|pair| !same(pair)).unwrap_or(seen.len().min(recorded.len()));
        let (seen, recorded) = (seen.get(position), recorded.get(position));
        if seen.is_none() && recorded.is_none() {
            return None;
        }
        let name = |id: Option<i64>| id.map_or_else(|| "has ended".to_owned(), |id| format!("has token {id}"));
        Some(format!(
            "its chat template or tokenizer makes another prompt than the recorded ones do: at position {position} its prompt {}, the \
             recorded one {}",
            name(seen.copied()),
            name(recorded.map(|&id| i64::from(id)))
        ))
    }

    /// The answer, and of how many tokens it is, as far as that is known.
    pub(super) fn into_answer(self, recorded: &[u32]) -> Result<(Answer, u64), Unusable> {
        if let Some(difference) = self.prompt_difference(recorded) {
            return Err(Unusable::Answer(difference));
        }
        let verbose_ids = self.verbose_ids().cloned();
        let counted = self.usage.and_then(|usage| usage.completion_tokens);
        let Some(choice) = self.choices.into_iter().flatten().next() else {
            return Err(Unusable::Reply("its reply has no choices".to_owned()));
        };
        let finish_reason = finish_reason(choice.finish_reason.as_deref())?;
        let ids = choice.token_ids.or(verbose_ids).map(checked_ids).transpose()?;
        let said = choice.message.ok_or_else(|| Unusable::Reply("its reply has no message".to_owned()))?;
        if ids.is_none() {
            is_whole_text(&said)?;
        }
        let tokens = ids.as_ref().map(|ids| ids.len() as u64).or(counted).unwrap_or(0);
        Ok((Answer { ids, text: said.content, finish_reason }, tokens))
    }
}

fn finish_reason(name: Option<&str>) -> Result<FinishReason, Unusable> {
    match name {
        Some("stop" | "tool_calls") => Ok(FinishReason::Stop),
        Some("length") => Ok(FinishReason::Length),
        Some(other) => Err(Unusable::Answer(format!("the server ended the answer for the reason `{other}`"))),
        None => Err(Unusable::Answer("the server does not say why the answer ended (`finish_reason` is null)".to_owned())),
    }
}

fn checked_ids(ids: Vec<i64>) -> Result<Vec<u32>, Unusable> {
    if ids.is_empty() {
        return Err(Unusable::Answer("the server's list of token ids is empty".to_owned()));
    }
    let fits = |id: i64| i32::try_from(id).ok().and_then(|id| u32::try_from(id).ok());
    let checked =
        |id| fits(id).ok_or_else(|| Unusable::Answer(format!("the server's list of token ids has {id}, which is none")));
    ids.into_iter().map(checked).collect()
}

/// Text stands for the answer only if the server has taken nothing out of it.
fn is_whole_text(said: &Said) -> Result<(), Unusable> {
    let is_some = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    let lacks = |what: &str, remedy: &str| {
        let reason = format!("the server took {what} out of the text and returns no token ids; start it {remedy}");
        Err(Unusable::Answer(reason))
    };
    if is_some(&said.reasoning_content) || is_some(&said.reasoning) {
        return lacks(
            "the thinking",
            "without its reasoning parser (`--reasoning-parser`; of llama.cpp `--reasoning-format none`)",
        );
    }
    if said.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty()) {
        return lacks(
            "tool calls",
            "without its parser of tool calls (`--tool-call-parser`), or a version that returns token ids",
        );
    }
    if !is_some(&said.content) {
        return Err(Unusable::Answer("empty answer".to_owned()));
    }
    Ok(())
}

/// The names in a list of models.
pub(super) fn models(body: &[u8]) -> Result<Vec<String>, String> {
    #[derive(Deserialize)]
    struct List {
        data: Vec<Model>,
    }
    #[derive(Deserialize)]
    struct Model {
        id: String,
    }
    let list: List = serde_json::from_slice(body)
        .map_err(|error| format!("its list of models cannot be read ({error}); set `regenerate.server_model`"))?;
    Ok(list.data.into_iter().map(|model| model.id).collect())
}

/// What a body says went wrong: the message in it where it is of a known form, else all of it.
pub(super) fn message_in(body: &[u8]) -> String {
    let Ok(value) = serde_json::from_slice::<Value>(body) else { return String::from_utf8_lossy(body).into_owned() };
    let places = ["/error/message", "/error", "/message", "/detail"];
    let message = places.iter().find_map(|place| value.pointer(place)).unwrap_or(&value);
    message.as_str().map_or_else(|| message.to_string(), str::to_owned)
}

#[cfg(test)]
pub(super) mod tests;
