//! JSON as Python's `json.dumps` lays it out, which is what models saw in training: a space after comma and colon, text
//! outside ASCII and HTML's characters as they are, floats in Python's spelling.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use serde_json::{Map, Number, Value as Json};

/// How `json.dumps` was asked to lay out its text.
pub(super) struct Layout {
    ensure_ascii: bool,
    sort_keys: bool,
    /// The text of one level; `None` keeps everything on one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
}

impl Layout {
    /// From the keyword arguments of `json.dumps` that the filter of `transformers` knows.
    pub(super) fn from_options(options: &Kwargs) -> Result<Layout, Error> {
        let indent = match options.get::<Option<Value>>("indent")?.filter(|indent| !indent.is_none()) {
            None => None,
            Some(indent) if indent.kind() == ValueKind::String => Some(indent.to_string()),
            Some(indent) => Some(" ".repeat(indentation(indent)?)),
        };
        // Python ends lines without a space.
        let item_separator = if indent.is_some() { "," } else { ", " };
        let separators = options.get::<Option<Vec<String>>>("separators")?;
        let (item_separator, key_separator) = match separators.as_deref() {
            None => (item_separator.to_owned(), ": ".to_owned()),
            Some([item, key]) => (item.clone(), key.clone()),
            Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "`separators` of tojson needs two texts")),
        };
        Ok(Layout {
            ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
            sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
            indent,
            item_separator,
            key_separator,
        })
    }

    pub(super) fn write(&self, value: &Json) -> String {
        let mut out = String::new();
        self.write_value(value, 0, &mut out);
        out
    }

    fn write_value(&self, value: &Json, depth: usize, out: &mut String) {
        match value {
            Json::Array(items) => {
                self.write_block(['[', ']'], items, depth, out, |item, out| self.write_value(item, depth + 1, out))
            }
            Json::Object(fields) => self.write_object(fields, depth, out),
            Json::String(text) => self.write_string(text, out),
            Json::Number(number) => out.push_str(&python_number(number)),
            Json::Bool(_) | Json::Null => out.push_str(&value.to_string()),
        }
    }

    fn write_object(&self, fields: &Map<String, Json>, depth: usize, out: &mut String) {
        let mut pairs: Vec<(&String, &Json)> = fields.iter().collect();
        if self.sort_keys {
            pairs.sort_by_key(|(key, _)| *key);
        }
        self.write_block(['{', '}'], &pairs, depth, out, |(key, value), out| {
            self.write_string(key, out);
            out.push_str(&self.key_separator);
            self.write_value(value, depth + 1, out);
        });
    }

    fn write_block<T>(
        &self,
        [open, close]: [char; 2],
        items: &[T],
        depth: usize,
        out: &mut String,
        write: impl Fn(&T, &mut String),
    ) {
        out.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(&self.item_separator);
            }
            self.start_line(depth + 1, out);
            write(item, out);
        }
        if !items.is_empty() {
            self.start_line(depth, out);
        }
        out.push(close);
    }

    fn start_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.push_str(&indent.repeat(depth));
        }
    }

    fn write_string(&self, text: &str, out: &mut String) {
        for character in Json::from(text).to_string().chars() {
            if self.ensure_ascii && !character.is_ascii() {
                let mut units = [0; 2];
                out.extend(character.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")));
            } else {
                out.push(character);
            }
        }
    }
}

/// A wider indentation than any template has is a mistake, and would cost its depth in memory.
fn indentation(indent: Value) -> Result<usize, Error> {
    let number = i64::try_from(indent)?;
    match usize::try_from(number.max(0)) {
        Ok(width) if width <= 32 => Ok(width),
        _ => Err(Error::new(ErrorKind::InvalidOperation, format!("`indent` of tojson is {number}; at most 32 is allowed"))),
    }
}

/// Python's `repr` of a number: the shortest digits that read back the same, as a power of ten from 1e16 on and below
/// 1e-4.
fn python_number(number: &Number) -> String {
    let float = match number.as_f64() {
        Some(float) if number.is_f64() => float,
        _ => return number.to_string(),
    };
    let scientific = format!("{float:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(power) if !(-4..16).contains(&power) => format!("{digits}e{}{:02}", if power < 0 { '-' } else { '+' }, power.abs()),
        _ => format!("{float:?}"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn dumps(options: &[(&str, Value)], json: &str) -> String {
        let options = options.iter().map(|(name, value)| (*name, value.clone())).collect();
        Layout::from_options(&options).unwrap().write(&serde_json::from_str(json).unwrap())
    }

    const SAMPLE: &str = r#"{"b": [1, 2.0, {}, []], "a": {"<&'>": "é\u0001\u007f\n\"😀", "none": null, "yes": true}}"#;

    // The expected texts are what Python 3 prints for the same values.
    #[test]
    fn one_line_keeps_order_and_escapes_only_what_json_must() {
        let expected = "{\"b\": [1, 2.0, {}, []], \"a\": {\"<&'>\": \"é\\u0001\u{7f}\\n\\\"😀\", \"none\": null, \"yes\": true}}";
        assert_eq!(dumps(&[], SAMPLE), expected);
    }

    #[test]
    fn options() {
        let expected = "{\n  \"b\": [\n    1,\n    {}\n  ],\n  \"a\": []\n}";
        assert_eq!(dumps(&[("indent", Value::from(2))], r#"{"b": [1, {}], "a": []}"#), expected);
        assert_eq!(dumps(&[("indent", Value::from("\t"))], "[1]"), "[\n\t1\n]");
        assert_eq!(dumps(&[("indent", Value::from(()))], "[1, 2]"), "[1, 2]");
        assert_eq!(dumps(&[("sort_keys", Value::from(true))], r#"{"b": 1, "a": 2}"#), r#"{"a": 2, "b": 1}"#);
        assert_eq!(dumps(&[("separators", Value::from(vec![",", ":"]))], r#"{"b": [1, 2]}"#), r#"{"b":[1,2]}"#);
        assert_eq!(dumps(&[("ensure_ascii", Value::from(true))], r#""é😀a""#), r#""\u00e9\ud83d\ude00a""#);
    }

    #[test]
    fn floats_as_python_spells_them() {
        let cases = [("1.0", "1.0"), ("0.1", "0.1"), ("1e16", "1e+16"), ("123456789012345.6", "123456789012345.6")];
        let more = [
            ("1e15", "1000000000000000.0"),
            ("0.0001", "0.0001"),
            ("0.00001", "1e-05"),
            ("1.5e300", "1.5e+300"),
            ("-0.0", "-0.0"),
        ];
        for (json, expected) in cases.into_iter().chain(more) {
            assert_eq!(dumps(&[], json), expected);
        }
    }
}
