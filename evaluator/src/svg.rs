//! What SVG charts are made of: axes with round numbers, legends that wrap, markers, and texts whose width is guessed.
//!
//! Colours come from the page: a mark of style `n` has the class `s{n}`. Lines also differ by marker and dashes, so
//! that they can be told apart without colour.

const TEXT: f64 = 12.0;
/// How many colours there are; a style beyond them takes its colour again.
pub(crate) const STYLES: usize = 6;

/// `text` for HTML and SVG, in elements and in quoted attributes. Characters that XML forbids are replaced.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            '\n' | '\t' => escaped.push(character),
            _ if character.is_control() => escaped.push('\u{fffd}'),
            _ => escaped.push(character),
        }
    }
    escaped
}

/// Where the data lie on the drawing: `x` and `y` are the values at the edges.
pub(crate) struct Frame {
    pub(crate) left: f64,
    pub(crate) right: f64,
    pub(crate) top: f64,
    pub(crate) bottom: f64,
    pub(crate) x: (f64, f64),
    pub(crate) y: (f64, f64),
    pub(crate) y_step: f64,
    pub(crate) percent: bool,
}

impl Frame {
    pub(crate) fn new(width: f64, legend: f64, height: f64, x: (f64, f64), y: (f64, f64), y_step: f64, percent: bool) -> Self {
        // The name of the y axis stands above it, where it can be read without turning the head.
        let top = legend + 26.0;
        let mut frame = Frame { left: 0.0, right: width - 16.0, top, bottom: top + height, x, y, y_step, percent };
        let longest = frame.y_ticks().iter().map(|(_, text)| text_width(text)).fold(0.0, f64::max);
        frame.left = longest + 10.0;
        frame
    }

    pub(crate) fn x(&self, value: f64) -> f64 {
        self.left + (value - self.x.0) / (self.x.1 - self.x.0) * (self.right - self.left)
    }

    pub(crate) fn y(&self, value: f64) -> f64 {
        self.bottom - (value - self.y.0) / (self.y.1 - self.y.0) * (self.bottom - self.top)
    }

    fn y_ticks(&self) -> Vec<(f64, String)> {
        let count = ((self.y.1 - self.y.0) / self.y_step).round().clamp(1.0, 20.0) as usize;
        let values = (0..=count).map(|tick| self.y.0 + tick as f64 * self.y_step);
        values.map(|value| (value, tick_text(value, self.y_step, self.percent))).collect()
    }

    pub(crate) fn y_axis(&self, label: &str) -> String {
        let mut drawn = format!(r#"<text class="strong" x="0" y="{}">{}</text>"#, at(self.top - 14.0), escape(label));
        for (value, text) in self.y_ticks() {
            let y = self.y(value);
            drawn += &format!(
                r#"<path class="grid" d="M{} {}H{}"/><text x="{}" y="{}" text-anchor="end">{text}</text>"#,
                at(self.left),
                at(y),
                at(self.right),
                at(self.left - 7.0),
                at(y + 4.0),
            );
        }
        drawn
    }

    pub(crate) fn x_axis(&self, ticks: &[(f64, String)], label: &str) -> String {
        let (left, right, bottom) = (at(self.left), at(self.right), at(self.bottom));
        let mut drawn = format!(r#"<path class="axis" d="M{left} {bottom}H{right}"/>"#);
        for (value, text) in ticks {
            // A number at the edge is moved inwards rather than cut off.
            let half = text_width(text) / 2.0;
            let (x, width) = (self.x(*value), self.right + 16.0);
            drawn += &format!(
                r#"<path class="axis" d="M{} {bottom}v4"/><text x="{}" y="{}" text-anchor="middle">{text}</text>"#,
                at(x),
                at(x.clamp(half, width - half)),
                at(self.bottom + 18.0),
            );
        }
        let middle = at((self.left + self.right) / 2.0);
        let y = at(self.bottom + 38.0);
        drawn + &format!(r#"<text class="strong" x="{middle}" y="{y}" text-anchor="middle">{}</text>"#, escape(label))
    }
}

/// The legend in as many rows as the width asks for, and its height; a single name needs none.
pub(crate) fn legend_rows(items: &[(usize, String)], width: f64, sample: impl Fn(usize, f64, f64) -> String) -> (String, f64) {
    if items.len() < 2 {
        return (String::new(), 0.0);
    }
    let (mut x, mut y, mut drawn) = (0.0, 10.0, String::new());
    for (style, name) in items {
        let name = shortened(name, width - 34.0);
        let extent = 28.0 + text_width(&name) + 14.0;
        if x > 0.0 && x + extent - 14.0 > width {
            (x, y) = (0.0, y + 20.0);
        }
        drawn += &sample(*style, x, y);
        drawn += &format!(r#"<text x="{}" y="{}">{}</text>"#, at(x + 28.0), at(y + 4.0), escape(&name));
        x += extent;
    }
    (drawn, y + 18.0)
}

pub(crate) fn line_sample(style: usize, x: f64, y: f64) -> String {
    let (class, dash) = (style % STYLES, dashes(style));
    let line = format!(r#"<path class="line s{class}"{dash} d="M{} {}h22"/>"#, at(x), at(y));
    line + &marker(style, x + 11.0, y)
}

pub(crate) fn square(x: f64, y: f64, class: &str) -> String {
    format!(r#"<rect class="{class}" x="{}" y="{}" width="20" height="12" rx="2"/>"#, at(x), at(y - 6.0))
}

pub(crate) fn dashes(style: usize) -> &'static str {
    // Within six styles the markers tell the lines apart; a second turn through the colours is dashed.
    if style >= STYLES { r#" stroke-dasharray="5 4""# } else { "" }
}

pub(crate) fn marker(style: usize, x: f64, y: f64) -> String {
    let class = style % STYLES;
    let (x, y, left, up) = (at(x), at(y), at(x - 3.5), at(y - 3.5));
    match class {
        0 => format!(r#"<circle class="fill s{class}" cx="{x}" cy="{y}" r="3.6"/>"#),
        1 => format!(r#"<rect class="fill s{class}" x="{left}" y="{up}" width="7" height="7"/>"#),
        2 => format!(r#"<path class="fill s{class}" d="M{x} {y}m0 -4.8l4.6 8.2h-9.2z"/>"#),
        3 => format!(r#"<path class="fill s{class}" d="M{x} {y}m0 -5l5 5l-5 5l-5 -5z"/>"#),
        4 => format!(r#"<path class="fill s{class}" d="M{x} {y}m0 4.8l4.6 -8.2h-9.2z"/>"#),
        _ => format!(r#"<circle class="hollow s{class}" cx="{x}" cy="{y}" r="3.4"/>"#),
    }
}

pub(crate) fn document(label: &str, width: f64, height: f64, body: &str) -> String {
    let label = escape(label);
    let (width, height) = (at(width), at(height));
    format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" viewBox="0 0 {width} {height}"><title>{label}</title>{body}</svg>"#
    )
}

/// A distance of 1, 2 or 5 times a power of ten that cuts `length` into about `count` parts.
pub(crate) fn nice_step(length: f64, count: f64) -> f64 {
    let rough = (length / count.max(1.0)).max(1e-12);
    let power = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= rough * 0.999).unwrap_or(10.0);
    factor * power
}

pub(crate) fn tick_text(value: f64, step: f64, percent: bool) -> String {
    if percent {
        return format!("{:.0} %", value * 100.0);
    }
    let decimals = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
    // A tick that rounds to zero must not read "-0".
    let value = if value.abs() < step / 2.0 { 0.0 } else { value };
    thousands(&format!("{value:.decimals$}")).replace('-', "−")
}

/// `20000` as `20,000`; the part after a point is left alone.
fn thousands(number: &str) -> String {
    let (whole, rest) = number.split_at(number.find('.').unwrap_or(number.len()));
    let (sign, digits) = whole.split_at(whole.len() - whole.trim_start_matches('-').len());
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 && digits.len() > 4 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    format!("{sign}{grouped}{rest}")
}

/// A value with the digits that matter, for labels and hovers.
pub(crate) fn short(value: f64) -> String {
    let text = match value.abs() {
        size if size >= 1000.0 || value == value.trunc() => format!("{value:.0}"),
        size if size >= 1.0 => format!("{value:.2}"),
        size if size >= 0.01 => format!("{value:.3}"),
        _ => format!("{value:.1e}"),
    };
    thousands(&text).replace('-', "−")
}

/// Smallest and largest value, moved apart when there is nothing between them.
pub(crate) fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
    if low > high {
        return (0.0, 1.0);
    }
    let enough = low.abs().max(high.abs()) * 1e-6;
    if high - low > enough { (low, high) } else { (low - 0.5 - enough, high + 0.5 + enough) }
}

/// Whether the arithmetic of axes stays finite for `value`.
pub(crate) fn is_drawable(value: f64) -> bool {
    value.is_finite() && value.abs() <= 1e12
}

pub(crate) fn at(coordinate: f64) -> String {
    let text = format!("{coordinate:.1}");
    text.strip_suffix(".0").unwrap_or(&text).to_owned()
}

/// About how wide `text` is drawn, rather too wide than too narrow.
pub(crate) fn text_width(text: &str) -> f64 {
    text.chars().map(|character| if character as u32 >= 0x2e80 { 1.0 } else { 0.58 }).sum::<f64>() * TEXT
}

/// `text` with its middle left out when it is wider than `width`.
pub(crate) fn shortened(text: &str, width: f64) -> String {
    let characters: Vec<char> = text.chars().collect();
    let mut kept = characters.len();
    let mut result = text.to_owned();
    while text_width(&result) > width && kept > 2 {
        kept -= 1;
        let head: String = characters[..kept.div_ceil(2)].iter().collect();
        let tail: String = characters[characters.len() - kept / 2..].iter().collect();
        result = format!("{head}…{tail}");
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers() {
        for (length, count, step) in [(1.0, 5.0, 0.2), (90.0, 10.0, 10.0), (0.03, 6.0, 0.005), (20000.0, 8.0, 5000.0)] {
            assert!((nice_step(length, count) / step - 1.0).abs() < 1e-9, "{length} in {count}: {}", nice_step(length, count));
        }
        assert_eq!(tick_text(20000.0, 5000.0, false), "20,000");
        assert_eq!(tick_text(-0.1, 0.05, false), "−0.10");
        assert_eq!(tick_text(-1e-17, 0.2, false), "0.0");
        assert_eq!(tick_text(0.6, 0.2, true), "60 %");
    }

    #[test]
    fn points_land_where_their_values_say() {
        let frame =
            Frame { left: 10.0, right: 110.0, top: 0.0, bottom: 50.0, x: (1.0, 3.0), y: (0.0, 1.0), y_step: 0.5, percent: false };
        assert_eq!((frame.x(1.0), frame.x(2.0), frame.x(3.0)), (10.0, 60.0, 110.0));
        assert_eq!((frame.y(0.0), frame.y(0.5), frame.y(1.0)), (50.0, 25.0, 0.0));
    }

    #[test]
    fn a_legend_wraps_before_it_leaves_the_drawing() {
        let items: Vec<(usize, String)> = (0..6).map(|style| (style, format!("checkpoint-{style}"))).collect();
        let (wide, one_row) = legend_rows(&items, 2000.0, |_, _, _| String::new());
        let (narrow, rows) = legend_rows(&items, 150.0, |_, _, _| String::new());
        assert_eq!((one_row, rows), (28.0, 28.0 + 5.0 * 20.0));
        assert_eq!(wide.matches("<text").count(), narrow.matches("<text").count());
    }

    #[test]
    fn long_names_lose_their_middle() {
        assert_eq!(shortened("short", 200.0), "short");
        let name = shortened(&"abcdefghij".repeat(20), 100.0);
        assert!(name.starts_with("abc") && name.ends_with("hij") && name.contains('…') && text_width(&name) <= 100.0);
    }
}
