//! The benchmarks of a recipe: read from their files, sampled, and made into the conversations that decoders are given.

use std::rc::Rc;

use anyhow::Context;
use configs::benchmarks::Form;
use data::benchmarks::Conversation;
use data::prompts::{Message, Rejected};
use data::sample::sample;
use evaluator::benchmark::{Benchmark, NextTurn};

use crate::models::Text;

/// What a recipe's benchmark holds, and what of it is used.
pub(crate) struct Chosen {
    /// In the file's order.
    pub(crate) conversations: Vec<Conversation>,
    /// Prompts of the file that could be used.
    pub(crate) prompts: usize,
    pub(crate) categories: usize,
    pub(crate) rejected: Vec<Rejected>,
}

/// Reads a benchmark's file and draws `limit` of its prompts by `seed`.
pub(crate) fn choose(benchmark: &configs::Benchmark, limit: Option<usize>, seed: u64) -> anyhow::Result<Chosen> {
    let preset = benchmark.preset;
    let form = preset.map(|preset| match &preset.form {
        Form::Templates(templates) => data::benchmarks::Form::Templates(templates),
        Form::Turns(field) => data::benchmarks::Form::Turns(field),
    });
    let category_field = preset.and_then(|preset| preset.category.as_deref());
    let data::benchmarks::Benchmark { conversations, rejected, .. } =
        data::benchmarks::read(&benchmark.path, form, category_field)
            .with_context(|| format!("cannot read benchmark `{}`", benchmark.name))?;
    let rows: Vec<(&str, &str)> = conversations.iter().map(|it| (it.request.id.as_str(), it.category.as_str())).collect();
    let mut categories: Vec<&str> = rows.iter().map(|&(_, category)| category).collect();
    categories.sort_unstable();
    categories.dedup();
    let (prompts, categories) = (rows.len(), categories.len());
    let drawn = sample(&rows, limit.unwrap_or(usize::MAX), seed);
    let conversations = drawn.into_iter().map(|index| conversations[index].clone()).collect();
    Ok(Chosen { conversations, prompts, categories, rejected })
}

impl Chosen {
    /// How many prompts, in words.
    pub(crate) fn describe(&self, benchmark: &configs::Benchmark) -> String {
        let used = self.conversations.len();
        let mut words = format!("{used} prompts");
        if used < self.prompts {
            words = format!("{used} of {} prompts, drawn by the seed", self.prompts);
        }
        if self.categories > 1 {
            words.push_str(&format!(" from {} categories", self.categories));
        }
        let turns = self.conversations.iter().map(|it| 1 + it.later_turns.len()).sum::<usize>();
        if turns != used {
            words.push_str(&format!(", {turns} turns in all"));
        }
        if let Some(first) = self.rejected.first() {
            let (count, line) = (self.rejected.len(), first.line);
            words.push_str(&format!("; rows left out: {count}, the first at line {line}: {}", first.reason));
        }
        if let Some(preset) = benchmark.preset.filter(|preset| preset.prompts != self.prompts) {
            words.push_str(&format!("; {} has {}, so figures are not those of the whole set", preset.title, preset.prompts));
        }
        words
    }
}

/// The conversations in the target's tokens: first turns at once, later ones as the answers come.
pub(crate) fn conversations(name: &str, chosen: Chosen, text: &Rc<Text>, thinking: bool) -> anyhow::Result<Benchmark> {
    let conversations = chosen.conversations;
    let prompt = |it: &Conversation| -> anyhow::Result<Vec<u32>> {
        let prompt = text.prompt(&it.request.messages, thinking);
        Ok(prompt.with_context(|| format!("{} line {}", it.request.file, it.request.line))?.1)
    };
    let prompts: anyhow::Result<Vec<Vec<u32>>> = conversations.iter().map(prompt).collect();
    let has_later = conversations.iter().any(|it| !it.later_turns.is_empty());
    let text = Rc::clone(text);
    let next = move |index: usize, answers: &[&[u32]]| {
        next_prompt(&text, &conversations[index], answers, thinking).map_err(|error| format!("{error:#}"))
    };
    let next_turn = has_later.then(|| Box::new(next) as Box<NextTurn>);
    Ok(Benchmark { name: name.to_string(), prompts: prompts?, next_turn })
}

/// The whole conversation up to the next answer, or nothing when it is over. Answers go back as the text that a person would read: what a
/// template leaves out of earlier answers, such as thinking, is its own business.
fn next_prompt(text: &Text, conversation: &Conversation, answers: &[&[u32]], thinking: bool) -> anyhow::Result<Option<Vec<u32>>> {
    if answers.is_empty() || answers.len() > conversation.later_turns.len() {
        return Ok(None);
    }
    let message = |role: &str, content: String| Message::new(role, content);
    let mut messages = conversation.request.messages.clone();
    for (answer, later) in answers.iter().zip(&conversation.later_turns) {
        messages.push(message("assistant", text.tokenizer.decode(answer, true)?));
        messages.push(message("user", later.clone()));
    }
    Ok(Some(text.prompt(&messages, thinking)?.1))
}

#[cfg(test)]
mod tests;
