//! A comparison as comma-separated values (RFC 4180).

use super::{Comparison, Estimate, PublishedRow, Row, Verdict};

/// A column's name and a row's value in it.
type Field = (&'static str, String);

/// One line a row below a line of names, and what is not known empty. Published figures are lines of their own, which name the paper
/// they are from.
pub fn csv(comparison: &Comparison) -> String {
    let measured: Vec<Vec<Field>> = comparison.rows.iter().map(|row| fields(row, &comparison.against)).collect();
    let names: Vec<&str> = measured.iter().take(1).flatten().map(|(name, _)| *name).collect();
    let mut text = line(names.iter().copied());
    for fields in &measured {
        text += &line(fields.iter().map(|(_, value)| value.as_str()));
    }
    if let Some(published) = &comparison.published {
        for row in &published.rows {
            let known = published_fields(row, &published.caution);
            let value = |name: &&str| known.iter().find(|(known, _)| known == name).map_or("", |(_, value)| value.as_str());
            text += &line(names.iter().map(value));
        }
    }
    text
}

fn fields(row: &Row, against: &str) -> Vec<Field> {
    let difference = row.difference.as_ref();
    let mut fields: Vec<Field> = vec![
        ("label", row.label.clone()),
        ("run", row.run.clone().unwrap_or_default()),
        ("checkpoint", row.checkpoint.clone()),
        ("kind", row.kind.clone()),
        ("target", row.target.clone()),
        ("dtype", row.dtype.clone()),
        ("drafter_dtype", row.drafter_dtype.clone()),
        ("block_size", row.block_size.to_string()),
        ("layers", row.layers.to_string()),
        ("parameters", row.parameters.map_or(String::new(), |count| count.to_string())),
        ("fan_out", row.fan_out.clone()),
        ("concurrency", row.concurrency.to_string()),
        ("temperature", row.temperature.to_string()),
        ("benchmark", row.benchmark.clone()),
        ("decoder", row.decoder.clone()),
        ("prompts", row.prompts.to_string()),
        ("tokens", row.tokens.to_string()),
        ("rounds", row.rounds.to_string()),
    ];
    fields.extend(spread(["tau", "tau_low", "tau_high"], Some(row.tau), row.tau_interval));
    fields.push(("tokens_per_second", row.tokens_per_second.to_string()));
    fields.extend(spread(["speedup", "speedup_low", "speedup_high"], row.speedup, row.speedup_interval));
    fields.push(("hit_rate", number(row.hit_rate)));
    fields.push(("pack_milliseconds", number(row.pack_milliseconds)));
    fields.push(("identical", row.identical.unwrap_or_default().to_string()));
    fields.push(("against", difference.map_or(String::new(), |_| against.to_string())));
    fields.push(("paired_prompts", difference.map_or(String::new(), |difference| difference.prompts.to_string())));
    let tau = difference.and_then(|difference| difference.tau);
    fields.extend(estimated(["tau_difference", "tau_difference_low", "tau_difference_high"], tau));
    fields.push(("tau_verdict", verdict(tau)));
    let speed = difference.and_then(|difference| difference.speed_ratio);
    fields.extend(estimated(["speed_ratio", "speed_ratio_low", "speed_ratio_high"], speed));
    fields.push(("speed_verdict", verdict(speed)));
    fields.push(("notes", difference.map_or(String::new(), |difference| difference.notes.join("; "))));
    fields.extend([("published_in", String::new()), ("published_gpus", String::new())]);
    fields
}

fn published_fields(row: &PublishedRow, caution: &str) -> Vec<Field> {
    vec![
        ("label", format!("published {}", row.method)),
        ("target", row.target.clone()),
        ("benchmark", row.beside.clone().unwrap_or_else(|| row.benchmark.clone())),
        ("tau", row.tau.to_string()),
        ("speedup", row.speedup.to_string()),
        ("notes", caution.to_string()),
        ("published_in", row.paper.clone()),
        ("published_gpus", row.gpus.map_or(String::new(), |count| count.to_string())),
    ]
}

fn estimated(names: [&'static str; 3], estimate: Option<Estimate>) -> [Field; 3] {
    spread(names, estimate.map(|estimate| estimate.value), estimate.and_then(|estimate| estimate.interval))
}

fn spread([value_name, low_name, high_name]: [&'static str; 3], value: Option<f64>, interval: Option<(f64, f64)>) -> [Field; 3] {
    let (low, high) = interval.unzip();
    [(value_name, number(value)), (low_name, number(low)), (high_name, number(high))]
}

fn number(value: Option<f64>) -> String {
    value.map_or(String::new(), |value| value.to_string())
}

fn verdict(estimate: Option<Estimate>) -> String {
    estimate.and_then(|estimate| estimate.verdict).map_or("", Verdict::key).to_string()
}

/// One line; fields with a comma, a quote or a line break stand in quotes, quotes within them doubled.
pub(super) fn line<'f>(fields: impl Iterator<Item = &'f str>) -> String {
    let quoted = |field: &str| {
        let special = field.contains([',', '"', '\r', '\n']);
        if special { format!("\"{}\"", field.replace('"', "\"\"")) } else { field.to_string() }
    };
    format!("{}\r\n", fields.map(quoted).collect::<Vec<_>>().join(","))
}
