//! The serving engine of `regenerate`: servers that the recipe names answer, and what each of them does is shown.

use std::collections::HashSet;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use configs::Recipe;
use data::engine::Conversations;
use data::serving::{API_KEY_VARIABLE, ApiKey, EndpointPhase, EndpointState, Pace, ServingSettings, answer_all};

use crate::progress::Bar;
use crate::stages::Context;

/// Has all conversations by the recipe's servers. `show` is given, several times a second, what stands beside the bar: each server's rate.
/// What happens to a server, and what it did in all, are lines above the bar.
pub(super) fn answer(
    context: &Context<'_>,
    stop_tokens: &[u32],
    conversations: &mut dyn Conversations,
    bar: &Bar,
    show: &mut dyn FnMut(String),
) -> anyhow::Result<()> {
    let settings = settings(context.recipe, stop_tokens);
    let mut told = HashSet::new();
    let mut last = Vec::new();
    let stop: &AtomicBool = context.stop;
    let outcome = answer_all(conversations, &settings, stop, &mut |servers| {
        for line in servers.iter().flat_map(news) {
            if told.insert(line.clone()) {
                bar.note(&format!("{:>12} {line}", "regenerate"));
            }
        }
        show(servers.iter().map(|server| format!(" | {}", rate(server))).collect());
        last = servers.to_vec();
    });
    for server in &last {
        bar.note(&format!("{:>12} {}", "regenerate", summary(server)));
    }
    Ok(outcome?)
}

fn settings(recipe: &Recipe, stop_tokens: &[u32]) -> ServingSettings {
    let regenerate = &recipe.regenerate;
    let api_key = std::env::var(API_KEY_VARIABLE).ok().map(|key| key.trim().to_owned()).filter(|key| !key.is_empty());
    ServingSettings {
        endpoints: regenerate.endpoints.clone(),
        model: regenerate.server_model.clone(),
        concurrency: regenerate.concurrency,
        timeout: Duration::from_secs(regenerate.timeout as u64),
        retries: regenerate.retries as u32,
        temperature: regenerate.temperature,
        top_p: regenerate.top_p,
        top_k: regenerate.top_k as u32,
        max_new_tokens: regenerate.max_new_tokens as u32,
        thinking: recipe.target.thinking,
        seed: recipe.seed,
        api_key: api_key.map(ApiKey::new),
        stop_tokens: stop_tokens.to_vec(),
        pace: Pace::default(),
    }
}

/// What is worth a line, once.
fn news(server: &EndpointState) -> Vec<String> {
    let url = &server.url;
    let phase = match (&server.phase, &server.model) {
        (EndpointPhase::Live, Some(model)) => Some(format!("server {url} is live; it is asked for `{model}`")),
        (EndpointPhase::Dropped(reason), _) => Some(format!("server {url} is dropped: {reason}")),
        _ => None,
    };
    phase.into_iter().chain(server.notes.iter().map(|note| format!("server {url}: {note}"))).collect()
}

/// A server's part of the line beside the bar.
fn rate(server: &EndpointState) -> String {
    let name = server.url.split_once("://").map_or(server.url.as_str(), |(_, name)| name);
    let name = name.trim_end_matches('/');
    match &server.phase {
        EndpointPhase::New => format!("{name} probed"),
        EndpointPhase::Doubted => format!("{name} probed again"),
        EndpointPhase::Dropped(_) => format!("{name} dropped"),
        EndpointPhase::Live => format!(
            "{name} {:.1} answers/s, {:.0} tokens/s, {} under way",
            server.answers_per_second, server.tokens_per_second, server.under_way
        ),
    }
}

/// What a server did in all.
fn summary(server: &EndpointState) -> String {
    let mut line = format!("server {}: {} answers, {} tokens", server.url, server.answered, server.tokens);
    if server.rejected > 0 {
        line += &format!(", {} questions without an answer", server.rejected);
    }
    if server.faults > 0 {
        line += &format!(", {} failed requests", server.faults);
        line += &server.last_fault.iter().map(|fault| format!(", the last: {fault}")).collect::<String>();
    }
    line
}
