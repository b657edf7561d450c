//! What stands between the conversations of a run and whatever answers them: the built-in engine and serving engines take questions from
//! the same side and bring answers back to it, one at a time, in any order.

use std::ops::ControlFlow;

use serde_json::Value;

use crate::prompts::Message;
use crate::responses::FinishReason;

/// One answer that is asked for: the next turn of a conversation.
#[derive(Debug, Clone, PartialEq)]
pub struct Question {
    /// The caller's own number for it, unique among the questions under way.
    pub key: u64,
    pub messages: Vec<Message>,
    /// The tools that may be called, as the chat template is given them.
    pub tools: Option<Value>,
    /// The conversation so far as the recorded template and tokenizer have it, the generation prompt included, `[prompt tokens]`.
    pub prompt_ids: Vec<u32>,
    /// What sampling draws from: a function of the conversation's id and the turn, and of nothing else.
    pub counter: u64,
}

/// An answer, whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The ids that were generated, the stop token included where there was one, `[response tokens]`; `None` from a server that gives text
    /// alone.
    pub ids: Option<Vec<u32>>,
    /// What a server gave as text; `None` from an engine that gives ids alone.
    pub text: Option<String>,
    pub finish_reason: FinishReason,
}

/// The side that asks. All calls come from one thread.
pub trait Conversations {
    /// The next question, or `None` when there is nothing to ask now. After an answer there may be more: an engine is done when this gives
    /// `None` and no question is under way.
    fn next(&mut self) -> Option<Question>;

    /// Takes the answer to the question of this key, or why there will be none (then the conversation is rejected for this reason). `Break`
    /// asks the engine to stop: what is under way is dropped and asked again at another time.
    fn answer(&mut self, key: u64, answer: Result<Answer, String>) -> ControlFlow<()>;
}
