//! The model card: what the drafter is, what it reaches, how it is used, and what must not be expected of it.

use evaluator::score::{BenchmarkScore, Score};
use model::checkpoint::DrafterFile;
use torch::tch::Kind;

use super::Checked;
use super::origin::{License, Model, Origin};
use crate::models::kind_name;

/// What a card is written from.
pub(super) struct Described<'a> {
    pub(super) checked: &'a Checked,
    pub(super) origin: &'a Origin,
    /// What the weights are stored as.
    pub(super) kind: Kind,
    /// The folder's name.
    pub(super) name: &'a str,
}

/// The whole `README.md`.
pub(super) fn text(described: &Described<'_>) -> String {
    let Described { checked, origin, name, .. } = described;
    let target = target_name(origin);
    [
        front_matter(origin, &checked.drafter.kind),
        format!("# {}\n\n", inline(name)),
        format!(
            "A diffusion drafter for {target}: it writes blocks of tokens which that model, the target, verifies. The output stays the target's \
             own; how much sooner it comes is below. By itself the drafter is no better a model than its size allows. Made with Drafthorse \
             {}.\n\n",
            env!("CARGO_PKG_VERSION")
        ),
        facts(described),
        scores(origin),
        use_of(described, &target),
        license(origin),
    ]
    .concat()
}

fn target_name(origin: &Origin) -> String {
    match &origin.target {
        Some(Model { name, is_on_hub: true }) => format!("[{0}](https://huggingface.co/{0})", inline(name)),
        Some(Model { name, is_on_hub: false }) => format!("`{}`", inline(name)),
        None => "a target that is not recorded here".to_string(),
    }
}

/// The head that hubs read.
fn front_matter(origin: &Origin, kind: &str) -> String {
    let mut lines = vec!["library_name: transformers".to_string(), "pipeline_tag: text-generation".to_string()];
    let mut bases: Vec<&str> = [&origin.target, &origin.init]
        .into_iter()
        .flatten()
        .filter(|model| model.is_on_hub)
        .map(|model| model.name.as_str())
        .collect();
    bases.dedup();
    if !bases.is_empty() {
        lines.push("base_model:".to_string());
        lines.extend(bases.iter().map(|base| format!("- {}", yaml(base))));
    }
    if let Some(License { id, name, link }) = &origin.license {
        lines.push(format!("license: {}", yaml(id)));
        lines.extend(name.iter().map(|name| format!("license_name: {}", yaml(name))));
        lines.extend(link.iter().map(|link| format!("license_link: {}", yaml(link))));
    }
    lines.push("tags:".to_string());
    lines.extend(["drafthorse", kind, "speculative-decoding", "diffusion-drafter"].map(|tag| format!("- {}", yaml(tag))));
    format!("---\n{}\n---\n\n", lines.join("\n"))
}

/// A YAML scalar; quoted as in JSON, which is YAML too, unless it is plainly a word.
fn yaml(text: &str) -> String {
    let is_plain = text.chars().next().is_some_and(|first| first.is_ascii_alphabetic())
        && text.chars().all(|character| character.is_ascii_alphanumeric() || "-_./".contains(character))
        && !["true", "false", "null", "yes", "no", "on", "off", "y", "n"].contains(&text.to_ascii_lowercase().as_str());
    if is_plain { text.to_string() } else { serde_json::Value::from(text).to_string() }
}

/// Text in a line or a table's cell of Markdown.
fn inline(text: &str) -> String {
    let shown = |character: char| match character {
        '|' | '`' | '<' | '[' | ']' | '*' | '\\' => format!("\\{character}"),
        other if other.is_control() => " ".to_string(),
        other => other.to_string(),
    };
    text.chars().map(shown).collect()
}

/// The table of what it is.
fn facts(described: &Described<'_>) -> String {
    let Described { checked, origin, kind, .. } = described;
    let (drafter, config) = (&checked.drafter, &checked.config);
    let parameters: i64 = config.parameter_shapes().iter().map(|(_, shape)| shape.iter().product::<i64>()).sum();
    let layers = match &drafter.removed_layers[..] {
        [] => format!("{}, none removed by pruning", drafter.layers),
        removed => {
            let removed: Vec<String> = removed.iter().map(usize::to_string).collect();
            format!("{}; pruning removed {}, in this order", drafter.layers, removed.join(", "))
        }
    };
    let revision = origin.revision.as_ref().map(|revision| format!(", revision `{}`", inline(revision))).unwrap_or_default();
    let model = |model: &Model| format!("`{}`", inline(&model.name));
    let mut rows = vec![("drafts for", target_name(origin) + &revision)];
    rows.extend(origin.init.iter().map(|init| ("begun as", model(init))));
    rows.extend([
        ("kind", format!("`{}`: a whole {} model, embedding and head included", inline(&drafter.kind), config.model_type)),
        ("layers", layers),
        ("parameters", format!("{:.1} million", parameters as f64 / 1e6)),
        ("weights", kind_name(*kind).to_string()),
        ("block size", format!("{}, the anchor (the last token known) included", drafter.block_size)),
        ("labels", labels(drafter)),
        ("mask token", format!("{}, which stands for a place still to be filled", drafter.mask_token)),
        (
            "thinking",
            format!("trained on answers {} thinking; draft for such only", if drafter.thinking { "with" } else { "without" }),
        ),
        ("training", format!("{} steps, {} tokens seen", drafter.step, drafter.training_tokens)),
        ("checkpoint", format!("`{}`, recipe `{}`", inline(&origin.checkpoint), inline(&drafter.recipe_hash))),
    ]);
    let rows: String = rows.iter().map(|(name, value)| format!("| {name} | {value} |\n")).collect();
    format!("| | |\n|---|---|\n{rows}\n")
}

fn labels(drafter: &DrafterFile) -> String {
    let block = drafter.block_size;
    match drafter.labels.as_str() {
        "next" => format!("`next`: slot j predicts the token after its own place, so a block drafts {block}"),
        _ => format!(
            "`{}`: slot j predicts the token of its own place, so a block drafts {}",
            inline(&drafter.labels),
            block.saturating_sub(1)
        ),
    }
}

/// What the run measured, one row a benchmark and decoder.
fn scores(origin: &Origin) -> String {
    let Some(score) = &origin.score else {
        return "## Scores\n\nThis checkpoint has not been scored.\n\n".to_string();
    };
    let mut rows = String::new();
    // The decoder that is meant to be used comes first.
    let mut decoders: Vec<&String> = score.decoders.keys().collect();
    decoders.sort_by_key(|name| (*name == "autoregressive", *name != "asynchronous"));
    let benchmarks: std::collections::BTreeSet<&String> =
        score.decoders.values().flat_map(|decoder| decoder.benchmarks.keys()).collect();
    for benchmark in benchmarks {
        for decoder in &decoders {
            let Some(figures) = score.decoders[*decoder].benchmarks.get(benchmark) else { continue };
            rows += &row(benchmark, decoder, figures);
        }
    }
    format!(
        "## Scores\n\n| benchmark | decoder | τ (pooled) | speedup | hit rate | tokens/s | same output | prompts |\n\
         |---|---|---|---|---|---|---|---|\n{rows}\n{}\n\n",
        conditions(score, origin)
    )
}

fn row(benchmark: &str, decoder: &str, figures: &BenchmarkScore) -> String {
    const ABSENT: &str = "–";
    let with = |value: String, interval: Option<(f64, f64)>| match interval {
        Some((low, high)) => format!("{value} ({low:.2} to {high:.2})"),
        None => value,
    };
    let alone = decoder == "autoregressive";
    let tau = if alone { "1".to_string() } else { with(format!("{:.2}", figures.tau_pooled), figures.tau_interval) };
    let speedup = match figures.speedup.filter(|_| !alone) {
        Some(speedup) => with(format!("{speedup:.2}×"), figures.speedup_interval),
        None => ABSENT.to_string(),
    };
    let hit_rate = figures.hit_rate.map_or(ABSENT.to_string(), |rate| format!("{:.0} %", 100.0 * rate));
    let divergences = figures.first_divergences.len();
    let same = match figures.identical_to_autoregressive {
        None => ABSENT,
        Some(true) => "yes",
        Some(false) if divergences > 0 && figures.near_ties == Some(divergences) => "but for near-ties",
        Some(false) => "no",
    };
    let (benchmark, decoder) = (inline(benchmark), inline(decoder));
    let (rate, prompts) = (figures.tokens_per_second, figures.prompts);
    format!("| {benchmark} | {decoder} | {tau} | {speedup} | {hit_rate} | {rate:.1} | {same} | {prompts} |\n")
}

/// How the figures came about.
fn conditions(score: &Score, origin: &Origin) -> String {
    let devices = match &origin.devices {
        Some(devices) => format!("The recipe put them on: {}; ", inline(devices)),
        None => String::new(),
    };
    let sampling = match score.temperature {
        0.0 => "greedy".to_string(),
        temperature => format!("temperature {temperature}"),
    };
    let ahead = if score.fan_out.is_empty() { String::new() } else { format!(", drafted ahead: {}", inline(&score.fan_out)) };
    let drafter_dtype = if score.drafter_dtype.is_empty() { &score.dtype } else { &score.drafter_dtype };
    format!(
        "τ is the number of tokens committed per forward of the target, the correction included, over all rounds; speedup is against the \
         target decoding alone in the same run; hit rate is the share of rounds whose next draft was ready when the target had verified. \
         In brackets: 95 % intervals by bootstrap over the prompts. Target in {}, drafter in {}, {sampling}, {} at once{ahead}. {devices}\
         which processors or GPUs these were, scores do not record, so take speeds as the run's own and measure yours.",
        inline(&score.dtype),
        inline(drafter_dtype),
        match score.concurrency {
            1 => "one text".to_string(),
            texts => format!("{texts} texts"),
        },
    )
}

/// How to draft with it, and with what not.
fn use_of(described: &Described<'_>, target: &str) -> String {
    let drafter = &described.checked.drafter;
    let thinking = if drafter.thinking { " --thinking" } else { "" };
    let (block, mask) = (drafter.block_size, drafter.mask_token);
    let anchor = match drafter.anchor_sees.as_str() {
        "prefix" => "the anchor alone sees only what is before it",
        _ => "the anchor as well",
    };
    let drafts = match drafter.labels.as_str() {
        "next" => format!("All {block} rows are drafts: row j is the token at j + 1 places after the anchor"),
        _ => format!(
            "Row 0 is not used; row j is the token j places after the anchor, so there are {} drafts",
            block.saturating_sub(1)
        ),
    };
    format!(
        "## Use\n\nWith Drafthorse, this folder being `{name}` and `TARGET` the folder or file of {target}:\n\n\
         ```\ndrafthorse generate --target TARGET --drafter {name}{thinking} \"Why is the sky blue?\"\n```\n\n\
         Plain `transformers` loads it as an ordinary causal model, with which one token at a time can be predicted:\n\n\
         ```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n\
         model = AutoModelForCausalLM.from_pretrained(\"{name}\")\ntokenizer = AutoTokenizer.from_pretrained(\"{name}\")\n```\n\n\
         Drafting by blocks needs a decoder that knows `drafter.json`. A block is the last known token (the anchor) followed by {masks} times \
         the mask token {mask}, at the positions that follow the text. One forward fills it: each row sees the tokens of the text before the \
         anchor and all rows of its block, behind it as well ({anchor}). {drafts}. The target verifies them in one forward, keeps those that \
         are its own choice and puts its own token after them; keys and values of a block are thrown away, and those of the tokens kept are \
         computed causally.\n\n\
         No serving engine is known to us that drafts so today. Support for DFlash, as in vLLM and SGLang, is for drafters that read the \
         target's hidden states, which this one does not; their support for plain draft models assumes that rows see only what is before \
         them. Neither has been tried with this drafter. What an engine can do with any small model of the target's vocabulary is to draft \
         one token at a time; the figures above say nothing of that.\n\n",
        name = inline(described.name),
        masks = block.saturating_sub(1),
    )
}

fn license(origin: &Origin) -> String {
    if origin.from_scratch {
        return "## Licence\n\nThe weights began as random numbers and were trained on the target's answers; what its licence says of those \
                applies.\n"
            .to_string();
    }
    let of = match &origin.init {
        Some(Model { name, is_on_hub: true }) => format!("[{0}](https://huggingface.co/{0})", inline(name)),
        Some(init) => format!("`{}`", inline(&init.name)),
        None => "the model that it was begun as".to_string(),
    };
    match &origin.license {
        Some(license) => {
            let name = license.name.as_ref().unwrap_or(&license.id);
            format!("## Licence\n\nThe weights are derived from {of}, whose licence goes with them: {}.\n", inline(name))
        }
        None => format!(
            "## Licence\n\nThe weights are derived from {of}, whose licence goes with them. It is not recorded here: look it up before you \
             pass them on.\n"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_cannot_break_the_head_or_the_tables() {
        assert_eq!((yaml("Qwen/Qwen3-8B"), yaml("apache-2.0")), ("Qwen/Qwen3-8B".to_string(), "apache-2.0".to_string()));
        assert_eq!(
            (yaml("no"), yaml("a: b\n- c"), yaml("1.0")),
            ("\"no\"".to_string(), "\"a: b\\n- c\"".to_string(), "\"1.0\"".to_string())
        );
        assert_eq!(inline("a|b\n`<script>"), "a\\|b \\`\\<script>");
    }

    #[test]
    fn bases_are_those_on_a_hub_each_once() {
        let model = |name: &str, is_on_hub| Some(Model { name: name.to_string(), is_on_hub });
        let head = |target, init| front_matter(&Origin { target, init, ..Origin::default() }, "d3d");
        let once = head(model("Qwen/Qwen3-8B", true), model("Qwen/Qwen3-8B", true));
        assert!(once.contains("base_model:\n- Qwen/Qwen3-8B\ntags:"), "{once}");
        let both = head(model("Qwen/Qwen3-8B", true), model("Qwen/Qwen3-1.7B", true));
        assert!(both.contains("base_model:\n- Qwen/Qwen3-8B\n- Qwen/Qwen3-1.7B\ntags:"), "{both}");
        let local = head(model("Qwen3-8B", false), None);
        assert!(!local.contains("base_model") && !local.contains("license"), "{local}");
        assert!(local.starts_with("---\nlibrary_name: transformers\n") && local.ends_with("\n---\n\n"), "{local}");
    }

    #[test]
    fn figures_stand_with_their_intervals_and_without_what_does_not_apply() {
        let figures = BenchmarkScore {
            prompts: 100,
            tau_pooled: 3.456,
            tau_interval: Some((3.2, 3.7)),
            speedup: Some(2.0),
            hit_rate: Some(0.714),
            tokens_per_second: 123.45,
            identical_to_autoregressive: Some(true),
            ..BenchmarkScore::default()
        };
        assert_eq!(
            row("gsm8k", "asynchronous", &figures),
            "| gsm8k | asynchronous | 3.46 (3.20 to 3.70) | 2.00× | 71 % | 123.5 | yes | 100 |\n"
        );
        let alone = BenchmarkScore { prompts: 1, tokens_per_second: 10.0, ..BenchmarkScore::default() };
        assert_eq!(row("a|b", "autoregressive", &alone), "| a\\|b | autoregressive | 1 | – | – | 10.0 | – | 1 |\n");
    }
}
